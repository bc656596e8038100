"""Load new weights as soon as they are saved.

AReaL's rollout workers learn from a name service that the trainer has saved a
checkpoint, and look once a second: they miss it by a few milliseconds nearly every
time. Here the controller looks first, every few hundredths of a second, and passes the
update on when the checkpoint is there, so that the workers find it at their first look.
"""

from __future__ import annotations

from typing import Any, Final

from areal.infra import RolloutController
from areal.utils import name_resolve, names

POLL_SECONDS: Final = 0.02
SAVE_TIMEOUT_SECONDS: Final = 600.0


def load_when_saved(controller: RolloutController) -> None:
    """Make a controller hold back updates from disk until they are on disk."""
    update = controller.update_weights_from_disk

    async def update_when_saved(meta: Any) -> None:
        config = controller.config
        # The name's version is the one that the servers still have.
        name = names.update_weights_from_disk(
            config.experiment_name, config.trial_name, controller.get_version()
        )
        name_resolve.wait(
            name, timeout=SAVE_TIMEOUT_SECONDS, poll_frequency=POLL_SECONDS
        )
        await update(meta)

    controller.update_weights_from_disk = update_when_saved
