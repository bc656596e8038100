"""Ranks of a process group as processes, waited for with a limit and reaped."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 400
ROOT = Path(__file__).parents[2]


def run_ranks(module: str, world_size: int, directory: Path, *args: str) -> None:
    """Run ``python -m module RANK [args] DIRECTORY`` for each rank.

    Fails with the end of each rank's log unless all of them end well and in time.
    """
    workers: list[subprocess.Popen] = []
    codes: list = []
    logs = [directory / f"rank{rank}.log" for rank in range(world_size)]
    try:
        for rank, path in enumerate(logs):
            command = [sys.executable, "-m", module, str(rank), *args, str(directory)]
            with open(path, "wb") as log:
                workers.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, "PYTHONPATH": str(ROOT)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [w.wait(timeout=TIMEOUT_SECONDS) for w in workers]
    except subprocess.TimeoutExpired:
        codes = ["timed out"]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    ends = [path.read_text(errors="replace")[-3000:] for path in logs if path.exists()]
    assert codes == [0] * world_size, f"{codes}\n" + "\n=====\n".join(ends)
