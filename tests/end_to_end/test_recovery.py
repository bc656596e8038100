"""Processes killed in the middle of a run: it ends and says why, and it continues."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import RunningLaunch

STEPS, BATCH = 6, 4
OPTIONS = (
    "recover.mode=on",
    "recover.freq_steps=1",
    f"total_train_steps={STEPS}",
    "actor.optimizer.lr_scheduler_type=linear",
)
PROMPTS = re.compile(r"Collection INFO: step (\d+): prompts ([\d -]+)")


def prompts_of_steps(run: RunningLaunch) -> dict[int, list[int]]:
    """Step -> numbers of the prompts that it was trained on, as the run tells."""
    text = (run.run_dir / "launch.log").read_text()
    found = {}
    for step, numbers in PROMPTS.findall(text):
        prompts = []
        for part in numbers.split():
            first, _, last = part.partition("-")
            prompts += range(int(first), int(last or first) + 1)
        found[int(step)] = prompts
    return found


def saved_prompts(cwd: Path) -> dict[str, Any]:
    """What the current recover checkpoint says of the data."""
    (pointer,) = cwd.rglob("recover_current")
    info = pointer.parent / f"recover-{pointer.read_text()}" / "info"
    state: dict[str, Any] = json.loads((info / "dataloader_info.json").read_text())
    return state


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role, backend", [("actor", "dta:d2"), ("rollout", "dta:d1")])
def test_a_killed_worker_and_the_run_that_continues(
    tmp_path: Path, role: str, backend: str
) -> None:
    options = (*OPTIONS, f"actor.backend={backend}")
    with RunningLaunch(tmp_path, *options) as run:
        run.wait_for_step(2)
        run.find("--role", role).kill()
        assert run.wait(timeout_seconds=120) == 1, run.text()
        run.wait_until_empty()
        assert f"worker {role}/0" in run.text()
        before = prompts_of_steps(run)
        steps_before = [record["step"] for record in run.metrics()]
    assert steps_before[-1] < STEPS
    with RunningLaunch(tmp_path, *options) as run:
        assert run.wait(timeout_seconds=400) == 0, run.text()
        after = prompts_of_steps(run)
    first = min(after)  # counts from 0
    assert 2 <= first <= len(steps_before) + 1
    assert list(after) == list(range(first, STEPS))
    kept = [p for step in range(first) for p in before[step]]
    kept += [p for step in after for p in after[step]]
    assert len(kept) == STEPS * BATCH
    assert len(set(kept)) == len(kept)  # none trained twice
    state = saved_prompts(tmp_path)
    finished = set(range(state["next"])) - set(state["unsettled"])
    assert finished == set(kept)  # none lost
