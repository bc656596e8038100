"""Rates of a GPU, and the seconds of one operator on it: a roofline with quantisation.

An operator takes what its arithmetic or its bytes take, whichever is longer, and never
less than the start of a kernel. Matrix products and flash attention run in tiles; the
last wave of tiles counts as a whole one.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from projection.op_log import Op


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card and its host reach, not what they are sold with."""

    name: str
    gemm_flops: float = 650e12
    """Matrix products in bf16, FLOP/s with all multiprocessors busy."""
    gemm_fp32_flops: float = 50e12
    flash_forward_flops: float = 380e12
    """PyTorch's flash attention (FA2), forward, with all multiprocessors busy."""
    flash_backward_flops: float = 300e12
    bytes_per_second: float = 3.9e12
    """Element-wise kernels and copies."""
    kernel_seconds: float = 2.2e-6
    """Least time of one kernel."""
    host_forward_seconds: float = 10e-6
    """Host time per launch in a forward."""
    host_backward_seconds: float = 5e-6
    """The same in a backward, where no Python runs."""
    sync_seconds: float = 12e-6
    multiprocessors: int = 132
    memory_bytes: float = 141e9

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operator on the device."""
        least = op.launches * self.kernel_seconds
        moving = op.num_bytes / self.bytes_per_second
        if op.kind == "gemm":
            rate = self.gemm_flops if op.is_half else self.gemm_fp32_flops
            busy = max(
                share * _busy(_gemm_tiles(op, tile), self.multiprocessors)
                for tile, share in _GEMM_TILES.items()
            )
            return max(least, moving, op.flops / (rate * busy))
        if op.kind in ("flash forward", "flash backward", "tree attention"):
            is_forward = op.kind == "flash forward" or op.name.endswith("forward")
            rate = self.flash_forward_flops if is_forward else self.flash_backward_flops
            busy = _busy(op.tiles, self.multiprocessors)
            return max(least, moving, op.flops / (rate * busy))
        return max(least, moving)


CARDS = {
    "h200": Rates("H200"),
    # the same processors; 3.35 TB/s of memory in place of 4.8, scaled alike
    "h100": Rates("H100", bytes_per_second=2.7e12, memory_bytes=80e9),
}

# Tiles that cuBLAS has, and what share of the best rate they reach.
_GEMM_TILES = {(128, 256): 1.0, (128, 128): 0.92, (64, 128): 0.75, (64, 64): 0.55}


def _gemm_tiles(op: Op, tile: tuple[int, int]) -> int:
    rows, columns = op.shape[:2]
    a = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    b = math.ceil(rows / tile[1]) * math.ceil(columns / tile[0])
    tiles = min(a, b) * op.batch
    # Few tiles over a long sum are split along it.
    split = max(1, min(op.shape[2] // 512, 132 // max(1, tiles)))
    return tiles * split


def _busy(tiles: float, multiprocessors: int) -> float:
    """Return the share of multiprocessors that are busy, over whole waves."""
    if tiles <= 0:
        return 1.0
    return tiles / (math.ceil(tiles / multiprocessors) * multiprocessors)


def load_rates(name: str) -> Rates:
    """Return a card by name, or rates from a JSON or YAML file.

    Raises:
        ValueError: the file has a key that is none of `Rates`.
    """
    if name.lower() in CARDS:
        return CARDS[name.lower()]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--card {name}: expected one of {sorted(CARDS)} or a file")
    text = path.read_text()
    values: dict[str, Any] = (
        json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    )
    known = {field.name for field in fields(Rates)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{path}: unknown {unknown}; expected some of {sorted(known)}")
    return Rates(**{"name": path.stem, **values})


def rates_as_data(rates: Rates) -> dict[str, Any]:
    return asdict(rates)
