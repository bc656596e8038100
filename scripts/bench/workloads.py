"""Workloads: batches of token sequences, and the outputs that their loss reads.

tau2 workloads come from replayed episodes (`.npz`) where there are any. Otherwise they
are generated with the same shape: one sequence per model call, which holds the
conversation so far behind a long system prompt, with loss on that call's completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_dta.tree import PrefixTree
from recipes.tau2.recorded.sequences import load_sequences

TokenArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_NUM_SPECIAL = 8  # ids below are never drawn, so that thoughts always fork
# What comes before a completion and is not in the later history: nothing (so that a
# call's sequence is a prefix of the next one's), Qwen3's empty thoughts, which are part
# of the prompt, or about 200 tokens of thinking, which carry loss.
TEMPLATES = ("plain", "empty-think", "think")
_EMPTY_THINK_TOKENS = 4
_THINK_TOKENS = (100, 300)


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of sequences, and which of their tokens carry loss."""

    name: str
    source: str
    """``generated`` or the file that the tokens come from."""
    sequences: tuple[TokenArray, ...]
    loss_masks: tuple[BoolArray, ...]
    """Token-aligned, [len] each: true where a token carries loss. Never the first."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(mask.sum()) for mask in self.loss_masks)

    def subset(self, indices: Sequence[int]) -> Workload:
        return replace(
            self,
            sequences=tuple(self.sequences[i] for i in indices),
            loss_masks=tuple(self.loss_masks[i] for i in indices),
        )


class Work:
    """A workload on a device, with the loss that every variant takes.

    The loss sums the logprobs of the loss tokens, times a random weight per sequence,
    and divides by the number of loss tokens.
    """

    def __init__(
        self, workload: Workload, weights: Sequence[float], device: torch.device
    ) -> None:
        self.workload = workload
        self.weights = list(weights)
        self.device = device
        self.tree = PrefixTree.from_sequences(workload.sequences)
        self.tokens = [torch.from_numpy(s).to(device) for s in workload.sequences]
        self.positions: list[BoolArray] = [m[1:] for m in workload.loss_masks]
        """[len - 1] per sequence: entry t says whether token t + 1 carries loss."""
        self._loss_positions = [
            torch.from_numpy(np.flatnonzero(p)).to(device) for p in self.positions
        ]
        self._scale = 1.0 / max(1, workload.num_loss_tokens)

    @classmethod
    def of(cls, workload: Workload, device: torch.device, seed: int) -> Work:
        rng = np.random.default_rng(seed)
        weights = rng.standard_normal(len(workload.sequences)).tolist()
        return cls(workload, weights, device)

    @property
    def num_sequences(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        return [len(s) for s in self.workload.sequences]

    def loss(self, index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Return the share of one sequence, from its logprobs [len - 1]."""
        weight = self.weights[index] * self._scale
        return logprobs[self._loss_positions[index]].sum() * weight

    def subset(self, indices: Sequence[int]) -> Work:
        """Return the work of some of the sequences, with their weights."""
        if list(indices) == list(range(self.num_sequences)):
            return self
        weights = [self.weights[i] for i in indices]
        return Work(self.workload.subset(indices), weights, self.device)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size to make a workload, or to cut it to. None sets no limit."""

    vocab_size: int
    seed: int = 0
    path_tokens: int | None = None
    """Approximate length of the longest sequence."""
    max_sequences: int = 16
    max_tokens: int | None = None
    """Maximum sequence tokens; whole sequences are dropped from the end."""
    template: str = "empty-think"
    """One of TEMPLATES, for tau2."""
    prompt_tokens: int = 128
    """Tokens of the prompt of ``grpo-short``."""


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """Token counts of an episode, measured on tau2; ranges are inclusive."""

    system_tokens: int
    num_calls: int
    turn_tokens: tuple[int, int]
    """What users and tools add in front of each call."""
    completion_tokens: tuple[int, int]

    @property
    def mean_path_tokens(self) -> int:
        per_call = (sum(self.turn_tokens) + sum(self.completion_tokens)) // 2
        return self.system_tokens + self.num_calls * per_call


# Mean lengths and loss shares of the replayed episodes: airline 7,763 tokens, 1.95 %;
# telecom solo 10,654 tokens, 0.21 %.
EPISODES = {
    "tau2-airline": EpisodeShape(4828, 16, (100, 500), (60, 240)),
    "tau2-telecom-solo": EpisodeShape(9904, 11, (60, 160), (12, 32)),
}
GRPO_ANSWERS = 16
NO_SHARING_SEQUENCES = 8


def tau2(name: str, sizes: Sizes) -> Workload:
    """Generate as many episodes behind one system prompt as the sequences need."""
    shape = EPISODES[name]
    rng = np.random.default_rng(sizes.seed)
    scale = (sizes.path_tokens or shape.mean_path_tokens) / shape.mean_path_tokens

    def draw(bounds: tuple[int, int]) -> TokenArray:
        num_tokens = round(scale * rng.integers(bounds[0], bounds[1] + 1))
        return _random_tokens(rng, max(1, num_tokens), sizes.vocab_size)

    def think() -> tuple[TokenArray, int]:
        """Return the tokens before a completion, and how many of them carry loss."""
        if sizes.template == "plain":
            return np.empty(0, np.int64), 0
        if sizes.template == "empty-think":
            return np.arange(_EMPTY_THINK_TOKENS, dtype=np.int64), 0
        thoughts = np.concatenate([np.zeros(1, np.int64), draw(_THINK_TOKENS)])
        return thoughts, len(thoughts)

    system = draw((shape.system_tokens, shape.system_tokens))
    sequences, masks = [], []
    for _ in range(math.ceil(sizes.max_sequences / shape.num_calls)):
        history = system
        for _ in range(shape.num_calls):
            history = np.concatenate([history, draw(shape.turn_tokens)])
            thoughts, num_loss = think()
            completion = draw(shape.completion_tokens)
            sequences.append(np.concatenate([history, thoughts, completion]))
            num_loss += len(completion)
            masks.append(_tail_mask(len(sequences[-1]), num_loss))
            history = np.concatenate([history, completion])
    return Workload(name, "generated", tuple(sequences), tuple(masks))


def star(name: str, num_branches: int, branch_tokens: int, sizes: Sizes) -> Workload:
    """Generate one prompt and equally long branches, which carry the loss."""
    rng = np.random.default_rng(sizes.seed)
    prompt = _random_tokens(rng, sizes.prompt_tokens, sizes.vocab_size)
    branches = [
        _random_tokens(rng, branch_tokens, sizes.vocab_size)
        for _ in range(num_branches)
    ]
    for i, branch in enumerate(branches):  # they differ from the first token on
        branch[0] = i
    sequences = tuple(np.concatenate([prompt, branch]) for branch in branches)
    masks = tuple(_tail_mask(len(s), branch_tokens) for s in sequences)
    return Workload(name, "generated", sequences, masks)


def no_sharing(sizes: Sizes) -> Workload:
    """Generate unrelated sequences with loss everywhere: a tree saves nothing."""
    rng = np.random.default_rng(sizes.seed)
    longest = sizes.path_tokens or 1024
    sequences, masks = [], []
    for i in range(NO_SHARING_SEQUENCES):
        num_tokens = int(rng.integers(max(2, longest // 4), max(2, longest) + 1))
        sequence = _random_tokens(rng, num_tokens, sizes.vocab_size)
        sequence[0] = i
        sequences.append(sequence)
        masks.append(_tail_mask(num_tokens, num_tokens - 1))
    return Workload("no-sharing", "generated", tuple(sequences), tuple(masks))


def load(name: str, path: Path, sizes: Sizes) -> Workload:
    """Read replayed episodes, the output of recipes/tau2/replay.py.

    Ids beyond the model's vocabulary are renumbered (equal stays equal).

    Raises:
        ValueError: the file is not of that form; names it and what was found.
    """
    batch = load_sequences(path)
    if not batch.num_sequences:
        raise ValueError(f"{path} holds no sequences; expected at least one")
    indices = range(batch.num_sequences)
    sequences = tuple(batch.sequence(i).astype(np.int64) for i in indices)
    masks = tuple(batch.mask(i).copy() for i in indices)
    for mask in masks:
        mask[:1] = False  # nothing predicts a first token
    workload = limited(Workload(name, path.name, sequences, masks), sizes)
    if sizes.path_tokens is not None:
        workload = thinned(workload, sizes.path_tokens)
    return renumbered(workload, sizes.vocab_size)


def limited(workload: Workload, sizes: Sizes) -> Workload:
    """Keep the first sequences, at least one, within the limits of ``sizes``."""
    num_sequences = min(len(workload.sequences), sizes.max_sequences)
    if sizes.max_tokens is not None:
        ends = np.cumsum([len(s) for s in workload.sequences])
        fit = int(np.searchsorted(ends, sizes.max_tokens, side="right"))
        num_sequences = min(num_sequences, fit)
    return workload.subset(range(max(1, num_sequences)))


def thinned(workload: Workload, path_tokens: int) -> Workload:
    """Shorten the paths, not the shape of the tree: keep every n-th token of a node.

    The shares of loss tokens and of each node stay about the same.
    """
    longest = max(map(len, workload.sequences))
    if longest <= path_tokens:
        return workload
    tree = PrefixTree.from_sequences(workload.sequences)
    keep = np.zeros(tree.num_tree_tokens, dtype=bool)
    for node in tree.nodes:
        num_kept = max(1, round(node.num_tokens * path_tokens / longest))
        kept = np.arange(num_kept) * node.num_tokens // num_kept
        keep[node.first_token + kept] = True
    kept_of = [keep[tree.token_indices(i)] for i in range(tree.num_sequences)]
    return replace(
        workload,
        sequences=tuple(s[k] for s, k in zip(workload.sequences, kept_of, strict=True)),
        loss_masks=tuple(
            m[k] for m, k in zip(workload.loss_masks, kept_of, strict=True)
        ),
    )


def renumbered(workload: Workload, vocab_size: int) -> Workload:
    """Map the sequences to ids below ``vocab_size``.

    Raises:
        ValueError: there are more distinct tokens than that.
    """
    flat = np.concatenate(workload.sequences)
    if flat.max() < vocab_size:
        return workload
    distinct, number = np.unique(flat, return_inverse=True)
    if len(distinct) > vocab_size:
        raise ValueError(
            f"{workload.source} holds {len(distinct)} distinct tokens, the model's "
            f"vocabulary {vocab_size}; cut it with --max-sequences or take a larger "
            "model"
        )
    ends = np.cumsum([len(s) for s in workload.sequences])
    return replace(workload, sequences=tuple(np.split(number, ends[:-1])))


def make_workloads(
    name: str, sizes: Sizes, answer_tokens: Sequence[int], data: Path | None
) -> list[Workload]:
    """Make the workloads called ``name``: ``grpo-short`` has one per answer length.

    Reads ``<name>.npz`` in the folder ``data`` if it is there, else generates.

    Raises:
        ValueError: no workload of that name, or a file that cannot be read.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r}; expected one of {', '.join(WORKLOADS)}")
    if data is not None and (path := data / f"{name}.npz").exists():
        return [load(name, path, sizes)]
    made = WORKLOADS[name](sizes, answer_tokens)
    return [limited(workload, sizes) for workload in made]


WORKLOADS: dict[str, Callable[[Sizes, Sequence[int]], list[Workload]]] = {
    "tau2-airline": lambda sizes, _: [tau2("tau2-airline", sizes)],
    "tau2-telecom-solo": lambda sizes, _: [tau2("tau2-telecom-solo", sizes)],
    "grpo-short": lambda sizes, answers: [
        star(f"grpo-short/{n}", GRPO_ANSWERS, n, sizes) for n in answers
    ],
    "no-sharing": lambda sizes, _: [no_sharing(sizes)],
}


def _random_tokens(
    rng: np.random.Generator, num_tokens: int, vocab_size: int
) -> TokenArray:
    return rng.integers(_NUM_SPECIAL, vocab_size, num_tokens, dtype=np.int64)


def _tail_mask(num_tokens: int, num_loss: int) -> BoolArray:
    mask = np.zeros(num_tokens, dtype=bool)
    mask[num_tokens - num_loss :] = True
    return mask
