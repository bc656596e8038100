"""Recover checkpoints: two slots in turn, the old one whole until the new one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from areal.api import FinetuneSpec, StepInfo
from areal.api.cli_args import RecoverConfig
from areal.trainer import rl_trainer
from areal.utils.recover import RecoverHandler

from areal_dta.areal_fixes.checkpoint_slots import (
    SlotRecoverHandler,
    replace_text,
    slots_for_recovery,
)
from areal_dta.collector.planner import BatchPlanner
from areal_dta.schedule import FlopModel


class Engine:
    """Saves its weight as a file."""

    def __init__(self, weight: str = "") -> None:
        self.weight = weight
        self.fails = False

    def save(self, meta: Any) -> None:
        (Path(meta.path) / "weight").write_text(self.weight[:1])
        if self.fails:
            raise OSError("killed while writing")
        (Path(meta.path) / "weight").write_text(self.weight)

    def load(self, meta: Any) -> None:
        self.weight = (Path(meta.path) / "weight").read_text()


class Part:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def handler(root: Path, cls: type[Any] = SlotRecoverHandler) -> Any:
    config = RecoverConfig(
        experiment_name="e", trial_name="t", fileroot=str(root), mode="on", freq_steps=1
    )
    return cls(
        config, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)
    )


def dump(slots: RecoverHandler, engine: Engine, step: int) -> None:
    parts = [Part(step) for _ in range(4)]
    info = StepInfo(epoch=0, epoch_step=step, global_step=step, steps_per_epoch=8)
    slots.dump({"default": engine}, info, *parts)


def load(root: Path, cls: type[Any] = SlotRecoverHandler) -> tuple[Any, Engine, Part]:
    engine, parts = Engine(), [Part() for _ in range(4)]
    info = handler(root, cls).load({"default": engine}, *parts)
    return info, engine, parts[3]


def test_the_newest_whole_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert load(tmp_path)[0] is None
    slots = handler(tmp_path)
    for step in range(3):
        dump(slots, Engine(f"weight {step}"), step)
        info, engine, loader = load(tmp_path)
        assert info.last_step_info.global_step == step
        assert (engine.weight, loader.value) == (f"weight {step}", step)


@pytest.mark.parametrize("num_whole", [0, 1, 2])
def test_one_that_was_being_written_is_not(tmp_path: Path, num_whole: int) -> None:
    slots = handler(tmp_path)
    for step in range(num_whole):
        dump(slots, Engine(f"weight {step}"), step)
    broken = Engine("broken")
    broken.fails = True
    with pytest.raises(OSError, match="killed"):
        dump(slots, broken, num_whole)
    info, engine, _ = load(tmp_path)
    if num_whole == 0:
        assert info is None
    else:
        assert info.last_step_info.global_step == num_whole - 1
        assert engine.weight == f"weight {num_whole - 1}"


def test_costs_are_saved_with_it(tmp_path: Path) -> None:
    slots = handler(tmp_path)
    planner = BatchPlanner(FlopModel(1e6, 10, 1e5))
    slots.also["cost_model"] = planner
    dump(slots, Engine("w"), 0)
    again = handler(tmp_path)
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
    with slots_for_recovery():
        assert rl_trainer.RecoverHandler is SlotRecoverHandler
    assert rl_trainer.RecoverHandler is RecoverHandler
