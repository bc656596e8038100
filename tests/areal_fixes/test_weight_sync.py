"""New weights are loaded as soon as they are saved."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from areal.api.cli_args import NameResolveConfig
from areal.utils import name_resolve, names

from areal_dta.areal_fixes.rollout_workers import load_when_saved


def test_one_entry_is_kept_however_long_a_run_lasts(tmp_path: Path) -> None:
    name_resolve.reconfigure(
        NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path))
    )
    versions = iter(range(5))

    async def update(meta: Any) -> None:
        pass

    version = 0
    controller: Any = SimpleNamespace(
        config=SimpleNamespace(experiment_name="e", trial_name="t"),
        get_version=lambda: version,
        update_weights_from_disk=update,
    )
    load_when_saved(controller)
    for version in versions:
        name_resolve.add(names.update_weights_from_disk("e", "t", version), "1.0")
        asyncio.run(controller.update_weights_from_disk("meta"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1
    assert name_resolve.get(names.update_weights_from_disk("e", "t", 4)) == "1.0"


def test_updates_wait_for_the_checkpoint(tmp_path: Path) -> None:
    name_resolve.reconfigure(
        NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path))
    )
    updates: list[tuple[str, float]] = []

    async def update(meta: Any) -> None:
        updates.append((meta, time.monotonic()))

    controller: Any = SimpleNamespace(
        config=SimpleNamespace(experiment_name="e", trial_name="t"),
        get_version=lambda: 4,
        update_weights_from_disk=update,
    )
    load_when_saved(controller)
    saved: list[float] = []

    def save() -> None:
        saved.append(time.monotonic())
        name_resolve.add(names.update_weights_from_disk("e", "t", 4), "1.0")

    timer = threading.Timer(0.3, save)
    timer.start()
    asyncio.run(controller.update_weights_from_disk("meta"))
    timer.join()
    ((meta, loaded_at),) = updates
    assert meta == "meta"
    assert loaded_at >= saved[0]
