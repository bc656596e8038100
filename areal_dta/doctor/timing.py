"""Seconds of one block, forward and backward, by its number of tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.memory.budget import is_out_of_memory, release_memory
from areal_dta.tree import PrefixTree

BLOCK_TOKENS = (512, 1024, 2048, 4096, 8192)
_MIN_SECONDS = 0.5
"""A size is repeated until so much has passed."""
_GROWTH = 4
"""Bound on the seconds of a block over those of a block half as long."""
_SIZES = {
    # a few layers of a small shape; and of Qwen3-1.7B
    "cpu": (256, 768, 4, 4, 2, 64),
    "cuda": (2048, 6144, 4, 16, 8, 128),
}
_VOCAB_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one block."""

    num_tokens: int
    seconds: float | None
    """Median, forward and backward; None: not measured."""
    note: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None


def describe_shape(device: str) -> str:
    """Return which model is timed, and in which dtype."""
    hidden, _, layers, *_ = _SIZES[device]
    dtype = "bf16" if device == "cuda" else "fp32"
    return f"{layers} layers, hidden size {hidden}, {dtype}"


def time_blocks(device: str, max_seconds: float) -> list[Timing]:
    """Time blocks of each size that is expected to end within ``max_seconds``."""
    hidden, intermediate, layers, heads, kv_heads, width = _SIZES[device]
    config = Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=2 * BLOCK_TOKENS[-1],
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).train()
    start = time.perf_counter()
    found: list[Timing] = []
    expected = 0.0
    for num_tokens in BLOCK_TOKENS:
        left = max_seconds - (time.perf_counter() - start)
        if expected * 2 > left:  # once to warm up, once to measure
            note = f"not measured: about {expected:.0f} s each"
            found.append(Timing(num_tokens, None, note))
            expected *= _GROWTH
            continue
        try:
            seconds = _seconds_of_block(model, num_tokens, min(_MIN_SECONDS, left))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found.append(Timing(num_tokens, None, "out of memory"))
            break
        found.append(Timing(num_tokens, seconds))
        expected = seconds * _GROWTH
    del model
    release_memory()
    return found


def _seconds_of_block(
    model: torch.nn.Module, num_tokens: int, min_seconds: float
) -> float:
    """Return the median seconds of a chain of ``num_tokens`` with one output."""
    rng = np.random.default_rng(0)
    tree = PrefixTree.from_sequences([rng.integers(0, _VOCAB_SIZE, num_tokens + 1)])
    read = np.zeros(num_tokens, bool)
    read[-1] = True
    config = ExecutorConfig(block_tokens=num_tokens, retain_tokens=None)
    executor = TreeExecutor(model, config)  # type: ignore[arg-type]

    def loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return logprobs[-1]  # the only one that is read

    found: list[float] = []
    start = time.perf_counter()
    while len(found) < 2 or (
        time.perf_counter() - start < min_seconds and len(found) < 20
    ):
        began = time.perf_counter()
        executor.forward_backward(tree, loss, [read])  # reads its loss: waits
        if executor.model.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
        model.zero_grad(set_to_none=True)
    return statistics.median(found[1:])
