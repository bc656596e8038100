"""One harness for ranks: runs a function on gloo ranks and collects what it returns.

    python -m tests.engine.ranks MODULE FUNCTION RANK WORLD_SIZES DIRECTORY

Ranks are processes, waited for with a limit and reaped. They meet through a file.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 400
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
ROOT = Path(__file__).parents[2]


def run_ranks(
    function: Callable[[int, Path], Any], world_sizes: Sequence[int], directory: Path
) -> dict[int, list[Any]]:
    """Run ``function(rank, directory)`` on every rank of each world.

    The same processes serve all worlds, largest first, because importing AReaL takes
    seconds. Fails with the end of each rank's log unless all end well and in time.

    Returns:
        World size -> the result of each rank: tensors, numbers, strings, containers.
    """
    world_sizes = sorted(world_sizes, reverse=True)
    workers: list[subprocess.Popen] = []
    codes: list[Any] = []
    logs = [directory / f"rank{rank}.log" for rank in range(world_sizes[0])]
    try:
        for rank, path in enumerate(logs):
            command = [sys.executable, "-m", "tests.engine.ranks", function.__module__]
            command += [function.__name__, str(rank)]
            command += [",".join(map(str, world_sizes)), str(directory)]
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
    assert codes == [0] * world_sizes[0], f"{codes}\n" + "\n=====\n".join(ends)
    return {
        size: [
            torch.load(directory / f"{size}ranks-{rank}.pt", weights_only=True)
            for rank in range(size)
        ]
        for size in world_sizes
    }


def _be_rank(
    function: Callable[[int, Path], Any], rank: int, world_size: int, directory: Path
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    print(f"{world_size} ranks", flush=True)
    torch.save(function(rank, directory), directory / f"{world_size}ranks-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    module, name, rank_text, sizes, where = sys.argv[1:]
    chosen = getattr(import_module(module), name)
    for size_text in sizes.split(","):
        if int(rank_text) < int(size_text):
            _be_rank(chosen, int(rank_text), int(size_text), Path(where))
