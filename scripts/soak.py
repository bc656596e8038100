"""Real steps for an hour, with late, damaged and failed results and killed processes.

    python scripts/soak.py --minutes 60 --json soak.json --plot soak.png

Two runs of the main job on small batches, through the launcher and with synchronous
rollouts: a reference in which nothing is late, damaged or killed, and one in which one
process after another is killed, and the same command given again. Losses of the steps
that both have are compared. Memory, threads, file handles, processes and files of the
second run are sampled, and a line is fitted to each: one slope for all, and a level for
each stretch between two kills.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from bench.soak_workflow import DAMAGED, FAILS, LATE, REFERENCE_VARIABLE
from bench.table import machine

from areal_dta.processes.reaper import MARKER, marked_processes

SCRIPTS = Path(__file__).resolve().parent
OVERRIDES = (
    "hardware=cpu",
    "workflow=bench.soak_workflow.SoakWorkflow",
    "train_dataset.batch_size=4",
    "train_dataset.dataset_kwargs={num_problems: 20000}",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=64",
    "rollout.max_head_offpolicyness=0",
    "local.max_batch_size=1",  # answers do not depend on who is served beside them
    "total_train_epochs=1000",
    "recover.mode=on",
    "recover.freq_steps=20",
    "saver.freq_steps=null",
    "saver.freq_epochs=null",
)
KILLED = ("rollout server", "rollout worker", "trainer", "job", "launcher")
COMMANDS = {
    "rollout server": ("areal_dta.rollout_server.server",),
    "rollout worker": ("--role", "rollout"),
    "trainer": ("--role", "actor"),
    "job": ("areal_dta.startup.train_process",),
}
SAMPLED = ("memory MiB", "threads", "handles", "processes", "files")
SAMPLE_SECONDS = 5.0
WARM_UP_SECONDS = 90.0
"""Left out of the fit after the first step of each start."""
STALL_SECONDS = 600.0
"""A run without a step for so long, its start included, stands still."""
END_SECONDS = 120.0
"""Time limit of a run's end after a kill."""


class Run:
    """A launcher and the processes of its run."""

    def __init__(self, folder: Path, num_steps: int, is_reference: bool) -> None:
        self.directory = folder / "outputs" / "gsm8k-grpo" / "trial0"
        paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
        }
        if is_reference:
            env[REFERENCE_VARIABLE] = "1"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "areal_dta.launch"),
                *("--config", "gsm8k_grpo.yaml", *OVERRIDES),
                f"total_train_steps={num_steps}",
            ],
            cwd=folder,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.marker = self._marker()
        self._num_steps, self._since = -1, time.monotonic()
        self._first_num_steps = len(records(self.directory))
        self._first_step: float | None = None

    def last_step(self) -> float:
        """Return when the last step was seen for the first time, else the start."""
        if (num_steps := len(records(self.directory))) != self._num_steps:
            self._num_steps, self._since = num_steps, time.monotonic()
        return self._since

    def seconds_of_steps(self) -> float:
        """Return the seconds since the first step of this start; 0 before it."""
        now = time.monotonic()
        if self._first_step is None:
            if len(records(self.directory)) == self._first_num_steps:
                return 0.0
            self._first_step = now
        return now - self._first_step

    def processes(self) -> list[psutil.Process]:
        return marked_processes(self.marker)

    def find(self, name: str) -> psutil.Process | None:
        """Return one of the processes that can be killed."""
        if name == "launcher":
            return psutil.Process(self.process.pid)
        found = []
        for process in self.processes():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            words = COMMANDS[name]
            if "python" in os.path.basename(command[0]) and set(words) <= set(command):
                found.append(process)
        return min(found, key=lambda p: p.create_time(), default=None)

    def sample(self) -> dict[str, float]:
        """Return sums over all processes, and the number of files that they wrote."""
        total: Counter[str] = Counter({"processes": 0})
        for process in self.processes():
            try:
                with process.oneshot():
                    total["memory MiB"] += process.memory_full_info().pss / 2**20
                    total["threads"] += process.num_threads()
                    total["handles"] += process.num_fds()
                    total["processes"] += 1
            except psutil.Error:
                continue
        root = self.directory.parents[1]
        total["files"] = sum(len(files) for _, _, files in os.walk(root))
        return {name: float(total[name]) for name in SAMPLED}

    def wait_until_gone(self) -> str | None:
        """Wait for all processes to end; return what is wrong, if anything."""
        try:
            self.process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"the launcher did not end within {END_SECONDS:.0f} s"
        deadline = time.monotonic() + END_SECONDS
        while left := self.processes():
            if time.monotonic() > deadline:
                commands = [" ".join(process.cmdline()[:4]) for process in left]
                return f"left behind: {commands}"
            time.sleep(0.2)
        return None

    def _marker(self) -> str:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children():
                try:
                    if marker := child.environ().get(MARKER):
                        return marker
                except psutil.Error:
                    continue
            time.sleep(0.1)
        raise RuntimeError("the launcher started no run")


def records(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # the last may be in the making
    return [json.loads(line) for line in lines]


def soak(
    folder: Path, minutes: float, kill_minutes: float, num_steps: int
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Run with faults until the time is over; return samples and kills."""
    start = time.monotonic()
    samples: list[dict[str, float]] = []
    kills: list[dict[str, Any]] = []
    while time.monotonic() - start < 60 * minutes:
        run = Run(folder, num_steps, is_reference=False)
        began, victim = time.monotonic(), KILLED[len(kills) % len(KILLED)]
        while True:
            time.sleep(SAMPLE_SECONDS)
            now = time.monotonic()
            is_over = now - start >= 60 * minutes
            if run.process.poll() is not None:
                code = run.process.returncode
                raise RuntimeError(f"the run ended by itself, exit code {code}")
            sample = {"stretch": len(kills), "seconds": now - start}
            sample["age"] = run.seconds_of_steps()
            samples.append(sample | run.sample())
            target = run.find(victim) if now - began >= 60 * kill_minutes else None
            if is_over or target is not None:  # one that still starts is waited for
                break
            if now - run.last_step() > STALL_SECONDS:
                run.process.send_signal(signal.SIGINT)
                raise RuntimeError(f"no step for {STALL_SECONDS:.0f} s")
        if is_over:
            run.process.send_signal(signal.SIGINT)
            print("end:", run.wait_until_gone() or "in good order", flush=True)
            break
        assert target is not None
        step = len(records(run.directory))
        killed_at = time.monotonic()
        target.kill()
        wrong = run.wait_until_gone()
        seconds = round(time.monotonic() - killed_at, 1)
        kills.append({"killed": victim, "step": step, "seconds": seconds})
        kills[-1]["wrong"] = wrong
        print(f"step {step}: {victim} killed, gone after {seconds} s {wrong or ''}")
    return samples, kills


def slopes(samples: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Fit ``value = level of the stretch + slope x hours`` to each sampled value.

    Returns:
        Mean, slope per hour, and half the width of the slope's 95 % interval, which
        allows for samples that follow one another.
    """
    kept = [s for s in samples if s["age"] >= WARM_UP_SECONDS]
    hours = np.array([s["seconds"] for s in kept]) / 3600
    stretch = np.array([s["stretch"] for s in kept])
    result = {}
    for name in SAMPLED:
        values = np.array([s[name] for s in kept])
        x, y = hours.copy(), values.copy()
        for each in np.unique(stretch):  # levels drop out
            x[stretch == each] -= x[stretch == each].mean()
            y[stretch == each] -= y[stretch == each].mean()
        slope = float(x @ y / (x @ x))
        rest = y - slope * x
        follows = float(rest[1:] @ rest[:-1] / max(rest @ rest, 1e-12))
        count = max(2.0, len(x) * (1 - follows) / (1 + follows))  # independent ones
        error = float(np.sqrt(rest @ rest / count / (x @ x) * len(x) / count))
        result[name] = {
            "mean": round(float(values.mean()), 2),
            "slope_per_hour": round(slope, 3),
            "interval": round(1.96 * error, 3),
        }
    return result


def compare(
    reference: Sequence[dict[str, Any]], faulty: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Compare losses and rewards of the steps that both runs have."""
    pairs = list(zip(reference, faulty, strict=False))
    differences = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    equal = [a["loss"] == b["loss"] and a["reward"] == b["reward"] for a, b in pairs]
    return {
        "steps": len(pairs),
        "equal_steps": sum(equal),
        "first_different_step": equal.index(False) + 1 if False in equal else None,
        "largest_loss_difference": max(differences, default=0.0),
        "mean_loss": [float(np.mean([p[i]["loss"] for p in pairs])) for i in (0, 1)],
        "mean_reward": [
            float(np.mean([p[i]["reward"] for p in pairs])) for i in (0, 1)
        ],
    }


def plot(samples: Sequence[dict[str, float]], steps: list[Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 10.0), dpi=110)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(SAMPLED) + 1)
    minutes = [s["seconds"] / 60 for s in samples]
    for axes, name in zip(panels, SAMPLED, strict=False):
        axes.plot(minutes, [s[name] for s in samples], ".", markersize=2)
        axes.set(ylabel=name, ylim=(0, None))
    panels[-2].set(xlabel="minutes")
    panels[-1].plot([r["reward"] for r in steps], linewidth=0.5)
    panels[-1].set(xlabel="step", ylabel="reward")
    figure.tight_layout()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="length of the run with faults")
    add("--kill-minutes", type=float, default=6.0, help="time between two kills")
    add("--reference-minutes", type=float, default=10.0, help="length of the other run")
    add("--folder", type=Path, default=Path("soak"), help="for both runs' files")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    num_steps = 100_000  # more than there is time for
    folders = {name: args.folder / name for name in ("reference", "faulty")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    run = Run(folders["reference"], num_steps, is_reference=True)
    time.sleep(60 * args.reference_minutes)
    run.process.send_signal(signal.SIGINT)
    print("reference:", run.wait_until_gone() or "ended in good order", flush=True)
    reference = records(run.directory)
    samples, kills = soak(folders["faulty"], args.minutes, args.kill_minutes, num_steps)
    faulty = records(folders["faulty"] / "outputs" / "gsm8k-grpo" / "trial0")
    counts: Counter[str] = Counter()
    for record in faulty:
        for key, value in record.get("collector", {}).items():
            if key.startswith("collector/rejected/"):
                counts[key] += int(value)
    result = {
        "machine": machine(torch.device("cpu")),
        "command": "python scripts/soak.py " + " ".join(sys.argv[1:]),
        "shares": {"damaged": DAMAGED, "fails": FAILS, "late": LATE},
        "minutes": args.minutes,
        "steps": len(faulty),
        "kills": kills,
        "rejected": dict(counts),
        "slopes": slopes(samples),
        "losses": compare(reference, faulty),
    }
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        plot(samples, faulty, args.plot)
    return 1 if any(kill["wrong"] for kill in kills) else 0


if __name__ == "__main__":
    sys.exit(main())
