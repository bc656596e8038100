"""Attention of one step: rows that decode and pieces of prompts, packed in one call.

The model gets all tokens of a step as one sequence, without a mask and without padding:
first the newest token of each row, then pieces of prompts. In each layer this function
first stores the keys and values of all of them, so that a row or a piece may build on
a piece of the same step. Then

* rows attend to their own tails in one call, and to each node of the prefix cache in
  one call for all rows that share it: its K/V are read once, not once per row;
* pieces attend to the nodes of their path, and to themselves causally.

Attention over several key sets is their average, weighted by exp(log-sum-exp). Query
heads that share keys are folded into the query length, so that K/V are never repeated.
What each layer asks for (windows, soft caps, sinks) is what the executor's profile has
found; such layers take slower ways here.
"""

# T = tokens of the step, R = rows, S = queries, C = keys, N = query heads,
# K = key/value heads, G = N / K, D = head dim, M = parts

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from areal_dta.executor.attention import LayerAttention
from areal_dta.executor.kernels import accumulation_dtype, merge
from areal_dta.rollout_server.kv_cache import RowTails
from areal_dta.rollout_server.prefix_cache import KVShape, Node

ATTENTION_NAME = "areal_dta_rollout"
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of a node, in the step's tokens from `first` on."""

    node: Node
    start: int
    end: int
    first: int
    #: Nodes above; their K/V are complete once those of this step are stored.
    above: tuple[Node, ...]

    @property
    def last(self) -> int:
        return self.first + self.end - self.start


@dataclass(frozen=True, slots=True)
class CopiedPrefix:
    """Nodes whose K/V become the first columns of some rows' tails."""

    nodes: tuple[Node, ...]
    rows: list[int]


class SharedNodes:
    """Which rows read which nodes; made anew only when either changes."""

    def __init__(self, paths: Sequence[Sequence[Node]], device: torch.device) -> None:
        """Sort out the paths of the rows; an empty path reads the tail alone."""
        readers: dict[int, tuple[Node, list[int]]] = {}
        for row, path in enumerate(paths):
            for node in path:
                readers.setdefault(id(node), (node, []))[1].append(row)
        self.nodes = [node for node, _ in readers.values()]
        self.counts = [len(rows) for _, rows in readers.values()]
        rows = [row for _, found in readers.values() for row in found]
        self.rows = torch.tensor(rows, device=device)
        # parts[r] lists the partial results of row r: its tail is number r, others
        # follow in the order of `rows`; the number behind the last one is empty.
        num_rows, num_parts = len(paths), len(paths) + len(rows)
        parts: list[list[int]] = [[row] for row in range(num_rows)]
        for number, row in enumerate(rows, num_rows):
            parts[row].append(number)
        width = max(map(len, parts), default=1)
        padded = [found + [num_parts] * (width - len(found)) for found in parts]
        self.parts_RM = torch.tensor(padded, device=device)


@dataclass(slots=True)
class Step:
    """What the attention of one step needs to know."""

    num_tokens: int
    layers: Mapping[int, LayerAttention]
    tails: RowTails
    #: Columns in use per row, without the token of this step.
    lengths: Sequence[int]
    #: Position of each row's token.
    positions: Sequence[int]
    #: The nodes that each row reads, root first; empty where they were copied.
    paths: Sequence[Sequence[Node]]
    shared: SharedNodes
    pieces: Sequence[Piece]
    copied: Sequence[CopiedPrefix]
    num_calls: int = 0
    #: Place of each layer with attention in the caches, by its index in the model.
    slots: dict[int, int] = field(init=False)
    lengths_R: Tensor = field(init=False)
    rows_R: Tensor = field(init=False)
    bias_tail: Tensor | None = field(init=False)
    _causal: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.tails.keys.device
        self.slots = {layer: slot for slot, layer in enumerate(sorted(self.layers))}
        self.lengths_R = torch.tensor(self.lengths, device=device, dtype=torch.long)
        self.rows_R = torch.arange(len(self.lengths), device=device)
        self.bias_tail = None
        if len(set(self.lengths)) > 1:
            column_C = torch.arange(max(self.lengths) + 1, device=device)
            hidden_RC = column_C > self.lengths_R[:, None]
            dtype = self.tails.keys.dtype
            bias = torch.zeros(hidden_RC.shape, dtype=dtype, device=device)
            self.bias_tail = bias.masked_fill_(hidden_RC, -torch.inf)[:, None, None]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def causal_bias(self, size: int, group: int, like: Tensor) -> Tensor:
        """Return the additive mask of a piece on itself, [1, 1, G * S, S]."""
        key = (size, group, like.dtype)
        if key not in self._causal:
            bias = like.new_full((size, size), -torch.inf).triu_(1)
            self._causal[key] = bias.repeat(group, 1)[None, None]
        return self._causal[key]


_active_step: ContextVar[Step | list[Any] | None] = ContextVar(
    "areal_dta_active_step", default=None
)


@contextmanager
def attending(model: PreTrainedModel, step: Step | list[Any]) -> Iterator[None]:
    """Context manager for one call of the model on a step.

    A list instead of a step collects (layer, heads, key width, value width) per layer.
    """
    # The setter of the configuration; the model's own would walk all modules.
    previous = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION_NAME
    token = _active_step.set(step)
    try:
        yield
    finally:
        _active_step.reset(token)
        model.config._attn_implementation = previous


def measure_kv(model: PreTrainedModel, inputs: dict[str, Any]) -> KVShape:
    """Return the sizes of the model's keys and values; calls it once."""
    found: list[tuple[int, int, int]] = []
    with attending(model, found):
        model(**inputs)
    heads, key_dims, value_dims = zip(*found, strict=True)
    weight = next(model.parameters())
    return KVShape(
        len(found),
        max(heads),
        max(key_dims),
        max(value_dims),
        model.dtype,
        weight.device,
    )


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that Transformers calls in each layer; returns [1, T, N, D].

    query: [1, N, T, D]; key, value: [1, K, T, D].
    """
    step = _active_step.get()
    assert step is not None, "called outside of `attending`"
    if isinstance(step, list):
        step.append((key.shape[1], key.shape[3], value.shape[3]))
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape), None
    assert query.shape[2] == step.num_tokens
    step.num_calls += 1
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = _Layer(step, index, query[0], key[0], value[0])
    return layer.attend(kwargs.get("s_aux"))[None], None


AttentionInterface.register(ATTENTION_NAME, _packed_attention)


class _Layer:
    """One layer's attention in one step."""

    def __init__(self, step: Step, index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.step, self.index = step, step.slots[index]
        self.q_NTD, self.k_KTD, self.v_KTD = q, k, v
        self.asked = step.layers[index]
        self.num_kv_heads = k.shape[0]
        self.group = q.shape[0] // k.shape[0]
        # Caches have the width of the widest layer.
        self.sizes = k.shape[0], k.shape[2], v.shape[2]

    def attend(self, sinks_N: Tensor | None) -> Tensor:
        """Return [T, N, D]."""
        self._store()
        num_heads, num_tokens, _ = self.q_NTD.shape
        out_TND = self.v_KTD.new_empty(num_tokens, num_heads, self.sizes[2])
        num_rows = self.step.num_rows
        if num_rows:
            q_RKGD = self.q_NTD[:, :num_rows].transpose(0, 1)
            q_RKGD = q_RKGD.reshape(num_rows, self.num_kv_heads, self.group, -1)
            far = self.asked.window is not None and (
                max(self.step.positions) >= self.asked.window
            )
            out, lse = self._rows_in_window(q_RKGD) if far else self._rows(q_RKGD)
            out, lse = out.flatten(1, 2), lse.flatten(1, 2)
            out_TND[:num_rows] = _with_sinks(out, lse, sinks_N)
        for piece in self.step.pieces:
            out, lse = self._piece(piece)  # [N, S, D], [N, S]
            out, lse = out.transpose(0, 1), lse.transpose(0, 1)
            out_TND[piece.first : piece.last] = _with_sinks(out, lse, sinks_N)
        return out_TND

    def _store(self) -> None:
        step, index = self.step, self.index
        heads, *widths = self.sizes
        caches = (step.tails.keys[index], step.tails.values[index])
        for which, (new, tail, width) in enumerate(
            zip((self.k_KTD, self.v_KTD), caches, widths, strict=True)
        ):
            for piece in step.pieces:
                held = piece.node.kv[which][index, :heads, :, :width]
                held[:, piece.start : piece.end] = new[:, piece.first : piece.last]
            if not step.num_rows:
                continue
            tail = tail[:, :heads, :, :width]
            for copied in step.copied:
                at = 0
                for node in copied.nodes:
                    held = node.kv[which][index, :heads, :, :width]
                    tail[copied.rows, :, at : at + node.num_tokens] = held
                    at += node.num_tokens
            tail[step.rows_R, :, step.lengths_R] = new[:, : step.num_rows].transpose(
                0, 1
            )

    def _cached(self, node: Node, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return a node's keys and values, [1, K, C, D]."""
        heads, key_dim, value_dim = self.sizes
        keys, values = node.kv
        return (
            keys[self.index, :heads, start:end, :key_dim][None],
            values[self.index, :heads, start:end, :value_dim][None],
        )

    def _tail(self, rows: slice, start: int, end: int) -> tuple[Tensor, Tensor]:
        heads, key_dim, value_dim = self.sizes
        tails = self.step.tails
        return (
            tails.keys[self.index, rows, :heads, start:end, :key_dim],
            tails.values[self.index, rows, :heads, start:end, :value_dim],
        )

    def _rows(self, q_RKGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return [R, K, G, D] and log-sum-exps [R, K, G] of all rows."""
        step, shared = self.step, self.step.shared
        num_rows = step.num_rows
        tail = self._tail(slice(num_rows), 0, max(step.lengths) + 1)
        out, lse = self._scored(q_RKGD, *tail, step.bias_tail)
        if not shared.nodes:
            return out, lse
        # One call per node, for the queries of all rows that read it.
        outs, lses = [out], [lse]
        q_readers = q_RKGD[shared.rows].split(shared.counts)
        for node, q_nKGD in zip(shared.nodes, q_readers, strict=True):
            count, heads, group, dim = q_nKGD.shape
            folded = q_nKGD.transpose(0, 1).reshape(1, heads, count * group, dim)
            out, lse = self._scored(folded, *self._cached(node, 0, node.num_tokens))
            outs.append(out.view(heads, count, group, -1).transpose(0, 1))
            lses.append(lse.view(heads, count, group).transpose(0, 1))
        # Average each row's parts by their log-sum-exps; the last part is empty.
        outs.append(torch.zeros_like(outs[0][:1]))
        lses.append(torch.full_like(lses[0][:1], -torch.inf))
        lse_RMKG = torch.cat(lses)[shared.parts_RM]
        weight_RMKG = lse_RMKG.softmax(1)
        out_RMKGD = torch.cat(outs)[shared.parts_RM].to(weight_RMKG.dtype)
        merged = (weight_RMKG.unsqueeze(-1) * out_RMKGD).sum(1)
        return merged, lse_RMKG.logsumexp(1)

    def _rows_in_window(self, q_RKGD: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `_rows` does, row by row: the layer's window cuts off keys."""
        step, window = self.step, self.asked.window
        assert window is not None
        outs, lses = [], []
        for row, position in enumerate(step.positions):
            first = max(0, position + 1 - window)
            parts = [
                self._cached(node, max(0, first - node.start), node.num_tokens)
                for node in step.paths[row]
                if node.end > first
            ]
            length = step.lengths[row] + 1
            start = max(0, first - (position + 1 - length))
            parts.append(self._tail(slice(row, row + 1), start, length))
            keys, values = (torch.cat(x, 2) for x in zip(*parts, strict=True))
            out, lse = self._scored(q_RKGD[row : row + 1], keys, values)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def _piece(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Return [N, S, D] and log-sum-exps [N, S] of a piece of a prompt."""
        q_NSD = self.q_NTD[:, piece.first : piece.last]
        size, heads, group = q_NSD.shape[1], self.num_kv_heads, self.group
        folded = q_NSD.reshape(1, heads, group * size, -1)
        sources = [(node, 0, node.num_tokens) for node in piece.above]
        if piece.start:
            sources.append((piece.node, 0, piece.start))
        own = self._cached(piece.node, piece.start, piece.end)
        position = piece.node.start + piece.start
        window = self.asked.window
        if window is not None and position + size > window:
            first = max(0, position + 1 - window)
            parts = [
                self._cached(node, max(start, first - node.start), end)
                for node, start, end in sources
                if node.start + end > first
            ]
            keys, values = (torch.cat(x, 2) for x in zip(*parts, own, strict=True))
            device = q_NSD.device
            at_C = torch.arange(first, position + size, device=device)
            at_S = torch.arange(position, position + size, device=device)[:, None]
            hidden_SC = (at_C > at_S) | (at_C <= at_S - window)
            seen_SC = torch.zeros(hidden_SC.shape, dtype=q_NSD.dtype, device=device)
            seen_SC.masked_fill_(hidden_SC, -torch.inf)
            out, lse = self._scored(
                folded, keys, values, seen_SC.repeat(group, 1)[None, None]
            )
        else:
            bias = self.step.causal_bias(size, group, q_NSD) if size > 1 else None
            out, lse = self._scored(folded, *own, bias)
            for source in sources:
                out, lse = merge(
                    out, lse, *self._scored(folded, *self._cached(*source))
                )
        shape = (heads * group, size)
        return out.reshape(*shape, -1), lse.reshape(shape)

    def _scored(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend with folded heads: q [B, K, S, D]; k, v [B, K, C, D]."""
        scale, softcap = self.asked.scale, self.asked.softcap
        same_width = q.shape[-1] == k.shape[-1] == v.shape[-1]
        if q.device.type == "cpu" and same_width and softcap is None:
            out, lse = _flash_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
            return out, lse
        acc = accumulation_dtype(q.dtype)
        scores = (q.to(acc) @ k.to(acc).transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        return (weights @ v.to(acc)).to(q.dtype), lse


def _with_sinks(out: Tensor, lse: Tensor, sinks_N: Tensor | None) -> Tensor:
    """Take the weight of the sinks away; out [T, N, D], lse [T, N]."""
    if sinks_N is None:
        return out
    weight = torch.sigmoid(lse - sinks_N.to(lse.dtype))
    return (out.to(lse.dtype) * weight.unsqueeze(-1)).to(out.dtype)
