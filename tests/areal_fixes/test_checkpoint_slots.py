"""Recover checkpoints: two slots in turn, one of them whole whatever happens."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from areal.api import FinetuneSpec, StepInfo
from areal.infra.scheduler.exceptions import EngineCallError
from areal.trainer import dpo_trainer, rl_trainer, rw_trainer, sft_trainer
from areal.utils.recover import RecoverHandler

from areal_dta.areal_fixes import slot_files
from areal_dta.areal_fixes.checkpoint_slots import (
    SlotRecoverHandler,
    slots_for_recovery,
)
from areal_dta.areal_fixes.slot_files import (
    MANIFEST,
    RecoverError,
    find_checkpoint,
    recover_root,
    replace_text,
)
from areal_dta.collector.planner import BatchPlanner
from areal_dta.schedule import FlopModel
from tests.areal_fixes.slots import (
    Engine,
    Part,
    current,
    dump,
    handler,
    heard,
    load,
    recover_config,
    saved,
)


def test_the_newest_whole_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert load(tmp_path)[0] is None
    slots = handler(tmp_path)
    for step in range(3):
        dump(slots, Engine(f"weight {step}"), step)
        info, engine, loader = load(tmp_path)
        assert info.last_step_info.global_step == step
        assert (engine.weight, loader.value) == (f"weight {step}", step)
        assert (engine.version, engine.num_lr_steps) == (step + 1, step + 1)


def test_a_new_run_is_told_so_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with heard(caplog):
        assert find_checkpoint(recover_config(tmp_path)) is None
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "a new run" in caplog.text


def test_the_critic_is_restored_as_well(tmp_path: Path) -> None:
    """0.1.0 saved it, and let it start from its initial weights."""
    dump(handler(tmp_path), Engine("actor"), 4, critic=Engine("critic"))
    actor, critic = Engine(), Engine()
    checkpoint = find_checkpoint(recover_config(tmp_path))
    slots = handler(
        tmp_path, checkpoint=checkpoint, more_engines=lambda: {"critic": critic}
    )
    slots.load(actor, *(Part() for _ in range(4)))
    assert (actor.weight, critic.weight) == ("actor", "critic")
    assert (critic.version, critic.num_lr_steps) == (5, 5)


def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path) -> None:
    dump(handler(tmp_path), Engine("actor"), 4)
    slots = handler(
        tmp_path,
        checkpoint=find_checkpoint(recover_config(tmp_path)),
        more_engines=lambda: {"critic": Engine()},
    )
    with pytest.raises(RecoverError, match="critic is missing"):
        slots.load(Engine(), *(Part() for _ in range(4)))


def test_weights_that_an_engine_refuses_stop_the_run(tmp_path: Path) -> None:
    saved(tmp_path)
    engine: Any = Engine()
    engine.load = lambda meta: (_ for _ in ()).throw(RuntimeError("other shapes"))
    slots = handler(tmp_path, checkpoint=find_checkpoint(recover_config(tmp_path)))
    with pytest.raises(RecoverError, match="cannot be loaded: other shapes"):
        slots.load(engine, *(Part() for _ in range(4)))


def test_it_is_current_when_its_metrics_are_on_disk(tmp_path: Path) -> None:
    slots = handler(tmp_path)
    dump(slots, Engine("old"), 0)
    info = StepInfo(epoch=0, epoch_step=1, global_step=1, steps_per_epoch=8)
    slots.dump({"default": Engine("new")}, info, *(Part() for _ in range(4)))
    assert load(tmp_path)[1].weight == "old"
    slots.publish()
    assert load(tmp_path)[1].weight == "new"


@pytest.mark.parametrize("num_whole", [0, 1, 2])
def test_one_that_was_being_written_is_not(
    tmp_path: Path, num_whole: int, caplog: pytest.LogCaptureFixture
) -> None:
    slots = handler(tmp_path)
    for step in range(num_whole):
        dump(slots, Engine(f"weight {step}"), step)
    broken = Engine("broken")
    broken.error = OSError("killed while writing")
    with pytest.raises(OSError, match="killed"):
        dump(slots, broken, num_whole)
    with heard(caplog):
        info, engine, _ = load(tmp_path)
    if num_whole == 0:
        assert info is None
        assert "never finished" in caplog.text  # not silently
    else:
        assert info.last_step_info.global_step == num_whole - 1
        assert engine.weight == f"weight {num_whole - 1}"


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "first byte": lambda path: path.write_bytes(path.read_bytes()[:1]),
    "half": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
    ),
    "last byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "other byte": lambda path: path.write_bytes(b"~" + path.read_bytes()[1:]),
    "missing": lambda path: path.unlink(),
}
FILES = (
    "default/weight",
    "info/step_info.json",
    "info/dataloader_info.json",
    "info/saver_info.json",
    MANIFEST,
)


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_costs_one_checkpoint(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    slots = saved(tmp_path)
    whole = current(slots) / file
    content = whole.read_bytes()
    for name, damage in DAMAGES.items():
        whole.write_bytes(content)
        assert load(tmp_path)[1].weight == "weight 1"
        damage(whole)
        with heard(caplog):
            assert load(tmp_path)[1].weight == "weight 0", name
        assert "WARNING" in caplog.text and str(whole) in caplog.text, name


def test_the_damaged_slot_is_written_next(tmp_path: Path) -> None:
    slots = saved(tmp_path)
    broken = current(slots)
    (broken / "default" / "weight").unlink()
    again = handler(tmp_path, checkpoint=find_checkpoint(recover_config(tmp_path)))
    full = Engine("full")
    full.error = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(3):
        dump(again, full, 1)
        assert load(tmp_path)[1].weight == "weight 0"  # the intact one stays
    dump(again, Engine("new"), 1)
    assert current(slots) == broken
    assert load(tmp_path)[1].weight == "new"


@pytest.mark.parametrize("text", [None, "", "c", "\x00\xff"])
def test_a_damaged_pointer(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    slots = saved(tmp_path)
    if text is None:
        (slots / "recover_current").unlink()
    else:
        (slots / "recover_current").write_text(text)
    with heard(caplog):
        assert load(tmp_path)[1].weight == "weight 1"  # the further one
    assert "recover_current" in caplog.text


@pytest.mark.parametrize("damage", ["both cut", "both missing", "and the pointer"])
def test_without_a_whole_one_the_run_stops(tmp_path: Path, damage: str) -> None:
    slots = saved(tmp_path)
    for slot in ("a", "b"):
        if damage == "both missing":
            shutil.rmtree(slots / f"recover-{slot}")
        else:
            (slots / f"recover-{slot}" / "default" / "weight").write_bytes(b"")
    if damage == "and the pointer":
        (slots / "recover_current").unlink()
    with pytest.raises(RecoverError) as raised:
        find_checkpoint(recover_config(tmp_path))
    message = str(raised.value)
    assert "recover-a" in message and "recover-b" in message
    assert "another trial_name" in message and "recover.mode=off" in message


def test_recovery_that_is_off_looks_at_nothing(tmp_path: Path) -> None:
    slots = saved(tmp_path)
    shutil.rmtree(current(slots))
    assert find_checkpoint(recover_config(tmp_path, mode="off")) is None


def test_only_the_ends_of_a_large_file_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_files, "MAX_HASHED_BYTES", 64)
    monkeypatch.setattr(slot_files, "_END_BYTES", 16)
    weight = "x" * 100
    dump(handler(tmp_path), Engine(weight), 0)
    path = current(recover_root(recover_config(tmp_path))) / "default" / "weight"
    for place, is_found in ((0, True), (50, False), (99, True)):
        path.write_text(weight[:place] + "y" + weight[place + 1 :])
        if is_found:
            with pytest.raises(RecoverError, match="checksum differs"):
                find_checkpoint(recover_config(tmp_path))
        else:
            assert find_checkpoint(recover_config(tmp_path)) is not None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        EngineCallError("actor/0", "save", "[Errno 28] No space left on device"),
    ],
    ids=["here", "on a worker"],
)
def test_a_full_disk_costs_the_checkpoint_and_no_more(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    slots = handler(tmp_path)
    dump(slots, Engine("old"), 0)
    full = Engine("full")
    full.error = error
    with heard(caplog):
        dump(slots, full, 1)
        dump(slots, full, 2)
    assert slots.num_failed == 2
    assert "No space left on device: no recover checkpoint after step 3" in caplog.text
    root = recover_root(recover_config(tmp_path))
    assert sorted(p.name for p in root.iterdir()) == ["recover-a", "recover_current"]
    assert load(tmp_path)[1].weight == "old"
    dump(slots, Engine("new"), 3)
    assert load(tmp_path)[1].weight == "new"


def test_a_disk_that_fills_up_at_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call is refused, the checkpoint before stays whole."""
    slots = handler(tmp_path)
    dump(slots, Engine("old"), 0)
    fsync, num_calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for refused in range(1, 10):
        num_calls = 0
        info = StepInfo(epoch=0, epoch_step=1, global_step=1, steps_per_epoch=8)
        slots.dump({"default": Engine("new")}, info, *(Part() for _ in range(4)))
        assert slots.num_failed == refused
        assert load(tmp_path)[1].weight == "old"


def test_all_is_on_disk_before_the_pointer_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(str(path.relative_to(root)))
        fsync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        events.append(f"replace {Path(target).relative_to(root)}")
        replace(source, target)

    root = recover_root(recover_config(tmp_path))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    dump(handler(tmp_path), Engine("w"), 0)
    slot = root / "recover-a"
    manifest = events.index(f"replace recover-a/{MANIFEST}")
    pointer = events.index("replace recover_current")
    assert manifest < pointer
    before = set(events[:manifest])
    for path in slot.rglob("*"):
        if path.name != MANIFEST:
            assert str(path.relative_to(root)) in before
    assert {"recover-a", f"recover-a/{MANIFEST}.new"} <= before
    assert "recover-a" in events[manifest:pointer]  # the manifest's entry in it
    assert events[pointer - 1 :] == ["recover_current.new", events[pointer], "."]


# What 0.1.0 wrote.


def test_costs_are_saved_with_it(tmp_path: Path) -> None:
    slots = handler(tmp_path)
    planner = BatchPlanner(FlopModel(1e6, 10, 1e5))
    slots.also["cost_model"] = planner
    dump(slots, Engine("w"), 0)
    again = handler(tmp_path, checkpoint=find_checkpoint(recover_config(tmp_path)))
    other = BatchPlanner(FlopModel(5e6, 70, 2e5))
    again.also["cost_model"] = other
    again.load({"default": Engine()}, *(Part() for _ in range(4)))
    assert other.state_dict() != planner.state_dict()
    again.load_also()
    assert other.state_dict() == planner.state_dict()


def test_the_pointer_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "pointer"
    for text in ("a", "b"):
        replace_text(path, text)
        assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == ["pointer"]


def test_the_patch_is_undone() -> None:
    modules: tuple[Any, ...] = rl_trainer, sft_trainer, dpo_trainer, rw_trainer
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)
    with slots_for_recovery():
        for module in modules:
            made = module.RecoverHandler(recover_config(Path("unused")), spec)
            assert isinstance(made, SlotRecoverHandler)
    assert all(module.RecoverHandler is RecoverHandler for module in modules)
