"""Starts the real launcher and looks at the processes of its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from areal_dta.processes.reaper import MARKER, kill_marked, marked_processes

ROLLOUT_CONFIGS = ("gsm8k_grpo.yaml", "gsm8k_ppo.yaml")
REPOSITORY = Path(__file__).parents[2]

SMALL_BATCHES = (
    "train_dataset.batch_size=4",
    "train_dataset.dataset_kwargs={num_problems: 64}",
    "launch.startup_timeout_seconds=300",
    "launch.step_timeout_seconds=120",
)
SMALL_RUN = (*SMALL_BATCHES, "gconfig.n_samples=4", "gconfig.max_new_tokens=16")


def small_run(config: str) -> tuple[str, ...]:
    """Overrides that make a run of seconds of one of the project's configurations."""
    return SMALL_RUN if config in ROLLOUT_CONFIGS else SMALL_BATCHES


def launch_env() -> dict[str, str]:
    """Imports this clone whatever the working directory; few threads."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }


def run_launcher(
    *args: str, cwd: Path, timeout_seconds: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end."""
    return subprocess.run(
        [sys.executable, "-m", "areal_dta.launch", *args],
        cwd=cwd,
        env=launch_env(),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )


class RunningLaunch:
    """A launcher in the background; kills all that is left of its run at the end."""

    def __init__(
        self,
        cwd: Path,
        *overrides: str,
        config: str = "gsm8k_grpo.yaml",
        timeouts: int | None = None,
    ) -> None:
        """
        Args:
            timeouts: seconds to allow for start-up and for a step, where a scheduler
                takes longer than processes of this machine do.
        """
        if timeouts is not None:
            names = ("startup", "step", "worker")
            overrides += tuple(f"launch.{n}_timeout_seconds={timeouts}" for n in names)
        self.cwd = cwd
        self._experiment = config.removesuffix(".yaml").replace("_", "-")
        self.output = cwd / "launcher.out"
        with open(self.output, "w") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "areal_dta.launch"),
                    *("--config", config, *small_run(config), *overrides),
                ],
                cwd=cwd,
                env=launch_env(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.marker = self._wait_for_marker()

    def __enter__(self) -> RunningLaunch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        kill_marked(self.marker)

    @property
    def run_dir(self) -> Path:
        return self.cwd / "outputs" / self._experiment / "trial0"

    def text(self) -> str:
        return self.output.read_text()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def wait_for_step(self, step: int, timeout_seconds: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while f"step {step}/" not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def wait(self, timeout_seconds: float = 60.0) -> int:
        """Exit code of the launcher."""
        return self.process.wait(timeout=timeout_seconds)

    def processes(self) -> list[psutil.Process]:
        """All living processes of the run, without the launcher and its reaper."""
        return marked_processes(self.marker)

    def find(self, *words: str) -> psutil.Process:
        """The oldest Python process of the run with these words in its command."""
        found = [
            p
            for p in self.processes()
            if "python" in os.path.basename(p.cmdline()[0])
            and all(word in p.cmdline() for word in words)
        ]
        return min(found, key=lambda p: p.create_time())

    def wait_until_empty(self, timeout_seconds: float = 15.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while left := self.processes():
            assert time.monotonic() < deadline, [p.cmdline() for p in left]
            time.sleep(0.2)

    def _wait_for_marker(self) -> str:
        launcher = psutil.Process(self.process.pid)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            for child in launcher.children():
                try:
                    if marker := child.environ().get(MARKER):
                        return marker
                except psutil.Error:
                    continue
            time.sleep(0.1)
        self.process.kill()
        raise AssertionError(f"the launcher started no job: {self.text()}")
