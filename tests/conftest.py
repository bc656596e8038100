"""Set before torch is imported: no compiler, few threads, nothing from a hub."""

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
if not os.path.exists("/dev/nvidiactl"):  # Triton's programs in Python
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_statistics_left() -> Iterator[None]:
    """AReaL's trackers are global: what one test logs would be in another's export."""
    yield
    if (tracker := sys.modules.get("areal.utils.stats_tracker")) is not None:
        for each in tracker.TRACKERS.values():
            each.stats.clear()
