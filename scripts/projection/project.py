"""Rows of the projection: a model, a way to train it, what that takes on a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench.workloads import Workload

from areal_dta.executor import ExecutorConfig
from areal_dta.schedule import FlopModel, NeededOutputs
from areal_dta.tree import PrefixTree
from projection.passes import MODELS, Pass, dense_pass, qwen3_config, tree_pass
from projection.rates import Rates, rates_as_data
from projection.replay import Totals, extrapolated, wall_seconds

# Models of so many layers are recorded. The last layer runs at needed outputs only, so
# that layers in the middle are what the two differ by.
_LAYERS = (2, 3)
_ELEMENT_BYTES = 2

CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "unfused": {"fused_layers": "off"},
    "recompute": {"retain_tokens": 0},
    "mlp": {"recompute": "mlp"},
    "mixed": {"kernel": "flash_triton"},
    "tree": {"kernel": "triton_tree"},
}
"""Options of the executor beside the block, by the name of the choice. ``default`` has
fused layers, flash attention, and all graphs retained, whole."""


class Projector:
    """Projects one batch on one card.

    Args:
        max_layers: counts fewer layers than the models have, for tests.
    """

    def __init__(
        self, workload: Workload, rates: Rates, max_layers: int | None = None
    ) -> None:
        self.rates, self._max_layers = rates, max_layers
        self._lengths = [len(s) for s in workload.sequences]
        self._tree = PrefixTree.from_sequences(workload.sequences)
        self._needed = [mask[1:] for mask in workload.loss_masks]
        self.description = {
            "card": rates_as_data(rates),
            "torch": torch.__version__,
            "workload": workload.name,
            "num_sequences": len(self._lengths),
            "num_sequence_tokens": sum(self._lengths),
            "num_tree_tokens": self._tree.num_tree_tokens,
            "num_loss_tokens": workload.num_loss_tokens,
            "longest_tokens": max(self._lengths),
        }

    def dense(self, model: str, fused_layers: str = "off") -> list[dict[str, Any]]:
        """Return dense training, without and with checkpointing of layers.

        Args:
            fused_layers: ``off``, as AReaL trains; ``on``, with the executor's kernels.
        """
        lengths = self._lengths
        plain = self._project(
            model,
            lambda layers: dense_pass(
                qwen3_config(model, layers), lengths, fused_layers
            ),
        )
        name = "dense" if fused_layers == "off" else "dense, fused"
        plain |= {"model": model, "way": name}
        # With checkpointing every layer runs forward a second time, within the
        # backward, and one hidden state per layer is what is kept.
        passes, segments, per_layer = plain["_passes"], [], plain["_per_layer"]
        num_layers = self._num_layers(model)
        for segment, (of_layer, forward) in zip(
            plain["_segments"], per_layer, strict=True
        ):
            if segment.is_backward and forward is not None:
                segment = segment.plus(forward, float(num_layers))
            segments.append(segment)
            del of_layer
        hidden, longest = MODELS[model]["hidden_size"], min(32768, sum(self._lengths))
        of_one = (passes[1].peak_bytes - passes[0].peak_bytes) / (
            _LAYERS[1] - _LAYERS[0]
        )
        kept = longest * hidden * _ELEMENT_BYTES * num_layers
        first = passes[0].peak_bytes - (_LAYERS[0] - 1) * of_one
        checkpointed = self._row(segments, first + kept, passes[0].num_calls)
        checkpointed |= {"model": model, "way": f"{name}, checkpointing"}
        return [plain, checkpointed]

    def tree(self, model: str, block_tokens: int, choice: str) -> dict[str, Any]:
        """Return the executor with blocks of so many tokens; all graphs are retained
        but under ``recompute``."""
        options: dict[str, Any] = {}
        for name in choice.split("+"):
            if name not in CHOICES:
                raise ValueError(f"choice {name!r}; expected some of {list(CHOICES)}")
            options |= CHOICES[name]
        retain = options.pop("retain_tokens", None)
        config = ExecutorConfig(block_tokens, retain, **options)
        row = self._project(
            model,
            lambda layers: tree_pass(
                qwen3_config(model, layers), self._tree, self._needed, config
            ),
        )
        return row | {
            "model": model,
            "way": "tree",
            "block_tokens": block_tokens,
            "choice": choice,
        }

    def compared(self, model: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows as plain data, with ratios and with the bound on them.

        Args:
            rows: those of `dense`, unfused and fused, first.
        """
        flops = FlopModel.from_config(qwen3_config(model, self._num_layers(model)))
        needed = NeededOutputs.logprobs_at(self._tree, self._needed)
        least = flops.tree(self._tree, needed=needed)
        bound = flops.dense(self._lengths) / least
        dense, checkpointed, fused, fused_checkpointed = (
            row["milliseconds"] for row in rows[:4]
        )
        return [
            {key: value for key, value in row.items() if not key.startswith("_")}
            | {
                "ratio_to_dense": dense / row["milliseconds"],
                "ratio_to_checkpointing": checkpointed / row["milliseconds"],
                "ratio_to_fused": fused / row["milliseconds"],
                "ratio_to_fused_checkpointing": (
                    fused_checkpointed / row["milliseconds"]
                ),
                "flop_bound": bound,
                "flop_bound_with_checkpointing": bound * 4 / 3,
            }
            for row in rows
        ]

    def _num_layers(self, model: str) -> int:
        num_layers = MODELS[model]["num_hidden_layers"]
        return min(num_layers, self._max_layers or num_layers)

    def _project(self, model: str, run: Callable[[int], Pass]) -> dict[str, Any]:
        num_layers = self._num_layers(model)
        small, large = (run(layers) for layers in _LAYERS)
        layers = (*_LAYERS, num_layers)
        rates = self.rates
        segments = extrapolated(small.segments, large.segments, layers, rates)
        # One layer of each segment; and the forward that goes with a backward.
        one_more = extrapolated(
            small.segments, large.segments, (*_LAYERS, _LAYERS[0] + 1), rates
        )
        at = extrapolated(small.segments, large.segments, (*_LAYERS, _LAYERS[0]), rates)
        per_layer: list[tuple[Totals, Totals | None]] = []
        forward: Totals | None = None
        for a, b in zip(at, one_more, strict=True):
            of_layer = b.plus(a, -1.0)
            per_layer.append((of_layer, forward if b.is_backward else None))
            forward = None if b.is_backward else of_layer
        growth = (large.peak_bytes - small.peak_bytes) / (_LAYERS[1] - _LAYERS[0])
        peak = small.peak_bytes + growth * (num_layers - _LAYERS[0])
        row = self._row(segments, peak, small.num_calls)
        private = {"_passes": (small, large), "_segments": segments}
        return row | private | {"_per_layer": per_layer}

    def _row(
        self, segments: list[Totals], peak_bytes: float, num_calls: int
    ) -> dict[str, Any]:
        whole = segments[0]
        for segment in segments[1:]:
            whole = whole.plus(segment)
        return {
            "milliseconds": 1e3 * wall_seconds(segments, self.rates),
            "device_milliseconds": 1e3 * whole.device,
            "host_milliseconds": 1e3 * whole.host,
            "milliseconds_by_kind": {
                kind: 1e3 * seconds for kind, seconds in whole.seconds.items()
            },
            "launches": round(whole.launches),
            "syncs": round(whole.syncs),
            "gigabytes_moved": whole.num_bytes / 1e9,
            "petaflops": whole.flops / 1e15,
            "peak_gigabytes": peak_bytes / 1e9,
            "num_calls": num_calls,
        }
