"""Recover checkpoints of 0.1.0, and those that AReaL itself wrote, are loaded."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from areal.utils.recover import RecoverHandler

from areal_dta.areal_fixes.slot_files import (
    MANIFEST,
    RecoverError,
    find_checkpoint,
    recover_root,
    replace_text,
)
from tests.areal_fixes.slots import (
    Engine,
    Part,
    current,
    dump,
    handler,
    load,
    recover_config,
    saved,
)


def old_slot(slots: Path, state: Any) -> Path:
    """Make the current slot one of 0.1.0: a pickle, and no manifest."""
    info = current(slots) / "info"
    (current(slots) / MANIFEST).unlink()
    (info / "dataloader_info.json").unlink()
    (info / "dataloader_info.pkl").write_bytes(pickle.dumps([state]))
    return info


def test_slots_of_0_1_0_are_loaded(tmp_path: Path) -> None:
    old_slot(saved(tmp_path), {"value": 7})
    info, engine, loader = load(tmp_path)
    assert (info.last_step_info.global_step, engine.weight) == (1, "weight 1")
    assert loader.value == 7


def test_an_unfinished_slot_of_0_1_0_is_no_way_out(tmp_path: Path) -> None:
    slots = saved(tmp_path)
    old_slot(slots, {"value": 7})
    broken = current(slots)
    other = slots / ("recover-a" if broken.name == "recover-b" else "recover-b")
    replace_text(slots / "recover_current", other.name[-1])
    (other / "info" / "step_info.json").write_text("{")
    with pytest.raises(RecoverError, match="may be half written"):
        find_checkpoint(recover_config(tmp_path))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_a_pickle_is_data_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old_slot(saved(tmp_path, num_steps=1), Evil())
    with pytest.raises(RecoverError, match="which is not data"):
        find_checkpoint(recover_config(tmp_path))
    assert not (tmp_path / "evil").exists()


def test_what_areal_wrote_for_sft_is_loaded(tmp_path: Path) -> None:
    """0.1.0 left SFT, DPO and reward models to AReaL's handler."""
    dump(handler(tmp_path, RecoverHandler), Engine("old"), 3)
    info, engine, loader = load(tmp_path)
    assert (info.last_step_info.global_step, engine.weight) == (3, "old")
    assert loader.value == 3
    slots = handler(tmp_path, checkpoint=find_checkpoint(recover_config(tmp_path)))
    slots.dump({"default": Engine("unpublished")}, info.last_step_info, *[Part()] * 4)
    shutil.rmtree(recover_root(recover_config(tmp_path)) / "recover-a" / "info")
    (recover_root(recover_config(tmp_path)) / "recover-a" / MANIFEST).unlink()
    assert load(tmp_path)[1].weight == "old"


def test_a_damaged_one_of_areal_stops_the_run(tmp_path: Path) -> None:
    dump(handler(tmp_path, RecoverHandler), Engine("old"), 3)
    root = recover_root(recover_config(tmp_path))
    (root / "recover_info" / "step_info.json").write_text("")
    with pytest.raises(RecoverError, match="step_info"):
        find_checkpoint(recover_config(tmp_path))
