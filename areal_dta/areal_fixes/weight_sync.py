"""Send new weights to the rollout as soon as they are saved.

The way of the weights is AReaL's: the trainer saves a checkpoint and announces it in
the name service, each rollout worker waits for that entry and tells its server to load
(`areal_dta.rollout_server.weights`). But workers look only once per second, and miss
the entry by a few milliseconds nearly every time. Here the controller looks first, 50
times per second, and passes the update on when the checkpoint is there, so that the
workers find it at their first look.
"""

from __future__ import annotations

from typing import Any, Final

from areal.infra import RolloutController
from areal.utils import name_resolve, names

POLL_SECONDS: Final = 0.02
SAVE_TIMEOUT_SECONDS: Final = 600.0


def load_when_saved(controller: RolloutController) -> None:
    """Delay `update_weights_from_disk` until the checkpoint has been written.

    Undone by deleting the controller's own attribute of that name.
    """
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
