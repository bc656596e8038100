"""Repairs of single steps of AReaL's PPO trainer: all that is changed is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from areal.infra.rpc import rtensor
from areal.infra.rpc.rtensor import RTensor, TensorShardInfo
from areal.utils.timeutil import EpochStepTimeFreqCtl

from areal_dta.areal_fixes.registry import wrapped
from areal_dta.areal_fixes.trainer_steps import (
    critic_stats,
    free_results,
    saved_together,
    teacher_cleared,
)


def test_a_wrapped_method_is_put_back() -> None:
    class Owner:
        def double(self, x: int) -> int:
            return 2 * x

    owner = Owner()
    with wrapped(owner, "double", lambda call: lambda x: call(x) + 1):
        assert owner.double(3) == 7
    assert owner.double(3) == 6


def test_one_answer_per_step_for_actor_and_critic() -> None:
    frequency = EpochStepTimeFreqCtl(freq_epoch=None, freq_step=3, freq_sec=None)
    saver = SimpleNamespace(freq_ctl=frequency)
    answers = []
    for _ in range(6):
        with saved_together(saver):
            answers.append([frequency.check(epochs=0, steps=1) for _ in range(2)])
    assert answers == [[step in (2, 5)] * 2 for step in range(6)]
    assert "check" not in vars(frequency)


def test_statistics_of_the_critic_do_not_hide_the_actor_s() -> None:
    exported = {"ppo_critic/grad_norm": 1.0, "dta/sharing_ratio": 2.0}
    critic = SimpleNamespace(_custom_function_call=lambda name: exported)
    assert critic_stats(critic) == {
        "ppo_critic/grad_norm": 1.0,
        "critic/dta/sharing_ratio": 2.0,
    }
    assert critic_stats(None) == {}


def test_a_teacher_forgets_what_the_actor_forgets() -> None:
    class Controller:
        def __init__(self) -> None:
            self.cleared: list[Any] = []

        def clear_batches(self, *batches: Any) -> None:
            self.cleared.append(batches)

    actor, teacher = Controller(), Controller()
    with teacher_cleared(actor, teacher):
        actor.clear_batches("rollouts", "advantages")
    actor.clear_batches("later")
    with teacher_cleared(actor, None):
        actor.clear_batches("last")
    assert actor.cleared == [("rollouts", "advantages"), ("later",), ("last",)]
    assert teacher.cleared == [("rollouts",)]


def test_results_of_an_evaluation_are_freed() -> None:
    """They stayed on their workers for ever in 0.1.0."""
    freed = []

    class Backend:
        async def delete(self, address: str, shards: list[Any]) -> None:
            freed.append((address, shards))
            if address == "gone:1":
                raise ConnectionError("worker is gone")

    def result(address: str) -> dict[str, Any]:
        shard = TensorShardInfo(f"shard on {address}", address)
        return {"x": RTensor(shard, torch.zeros(1, device="meta"))}

    results = [result("gone:1"), None, result("here:2")]
    controller = SimpleNamespace(wait=lambda count, timeout: results[:count])
    free_results(controller)
    before = rtensor._backend
    rtensor.set_backend(Backend())  # type: ignore[arg-type]
    try:
        assert controller.wait(3, timeout=None) == results
    finally:
        rtensor.set_backend(before)
    assert freed == [
        ("gone:1", ["shard on gone:1"]),
        ("here:2", ["shard on here:2"]),
    ]
