"""The sequences that were read, as one prefix tree, with what is known of each.

Only the tree's tokens are kept, so memory follows what is distinct, not what is read.
"""

# T = tree tokens in depth-first order, N = sequences

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from areal_dta.schedule import NeededOutputs
from areal_dta.tree import PrefixTree

BoolArray = NDArray[np.bool_]

MAX_TOKEN_ID = 2**31 - 1


class InputError(ValueError):
    """A file cannot be read; the message says where, what was expected, what to do."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sequence of a file."""

    tokens: NDArray[np.int32]
    """[length]"""
    where: str
    """File and line, for messages."""
    loss_spans: tuple[tuple[int, int], ...] | None = None
    """Tokens that carry loss, as ranges that rise; None: not known."""
    episode: str = ""
    """Identity of the conversation whose calls share a history; empty: not known."""
    group: str = ""
    """Identity of the prompt or task; empty: not known."""
    call: int = 0
    """Which model call of its episode this is, from 0."""


@dataclass(slots=True)
class Limits:
    """How much to read; what comes after is left out, and the report says so."""

    max_sequences: int | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class Corpus:
    """Sequences with their tree."""

    tree: PrefixTree = field(default_factory=PrefixTree)
    where: list[str] = field(default_factory=list)
    episodes: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    loss_spans: list[tuple[tuple[int, int], ...] | None] = field(default_factory=list)
    stopped: str = ""
    """Which limit ended the reading; empty: everything was read."""

    def read(self, records: Iterable[Record], limits: Limits) -> None:
        """Take in records until a limit is reached."""
        for record in records:
            if limits.max_sequences is not None and len(self) >= limits.max_sequences:
                self.stopped = f"--max-sequences {limits.max_sequences:,}"
                return
            num_tokens = self.tree.num_sequence_tokens + len(record.tokens)
            if limits.max_tokens is not None and num_tokens > limits.max_tokens:
                if not len(self):
                    raise InputError(
                        f"{record.where}: the first sequence has "
                        f"{len(record.tokens):,} tokens, more than --max-tokens "
                        f"{limits.max_tokens:,}; raise it"
                    )
                self.stopped = f"--max-tokens {limits.max_tokens:,}"
                return
            self.add(record)

    def add(self, record: Record) -> None:
        """Add a sequence. Raises InputError if it is empty or not token ids."""
        try:
            self.tree.insert(record.tokens)
        except ValueError as error:
            raise InputError(f"{record.where}: {error}") from error
        self.where.append(record.where)
        self.episodes.append(record.episode)
        self.groups.append(record.group)
        self.calls.append(record.call)
        self.loss_spans.append(record.loss_spans)

    def __len__(self) -> int:
        return len(self.where)

    @property
    def knows_loss(self) -> bool:
        """Whether the tokens with loss are known of every sequence."""
        return all(spans is not None for spans in self.loss_spans)

    @property
    def num_loss_tokens(self) -> int:
        spans = (span for s in self.loss_spans for span in s or ())
        return sum(end - max(start, 1) for start, end in spans)

    def mask(self, sequence: int) -> BoolArray:
        """Return which tokens of a sequence carry loss, [length]; never the first."""
        mask = np.zeros(self.tree.sequence_length(sequence), bool)
        spans = self.loss_spans[sequence]
        for start, end in ((0, len(mask)),) if spans is None else spans:
            mask[start:end] = True
        mask[:1] = False  # nothing predicts a first token
        return mask

    def needed(self) -> NeededOutputs:
        """Return the outputs that a loss on the known spans reads; all if unknown."""
        if not self.knows_loss:
            return NeededOutputs.all(self.tree)
        return NeededOutputs.logprobs_at(self.tree, _Masks(self))

    def save(self, path: str | Path) -> None:
        """Write tokens and masks as ``scripts/bench_executor.py --data`` reads them."""
        indices = range(len(self))
        sequences = [self.tree.sequence(i).astype(np.int32) for i in indices]
        masks = [self.mask(i) for i in indices]
        numbers = np.arange(len(self), dtype=np.int32)
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate(sequences),
                loss_mask=np.concatenate(masks),
                offsets=np.cumsum([0, *map(len, sequences)]).astype(np.int64),
                domain=np.full(len(self), "inspected"),
                task_id=np.array([g or str(i) for i, g in enumerate(self.groups)]),
                trial=np.zeros(len(self), np.int32),
                episode=numbers,
                call=np.array(self.calls, np.int32),
                reward=np.zeros(len(self), np.float32),
            )


class _Masks(Sequence[BoolArray]):
    """Masks of the needed logprobs, [len - 1] each, made when they are asked for."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if index >= len(self):
            raise IndexError(index)
        return self._corpus.mask(index)[1:]


class FlatTree:
    """The tree as flat arrays: subtrees are ranges of tokens in depth-first order."""

    def __init__(self, corpus: Corpus) -> None:
        tree = corpus.tree
        self.corpus, self.nodes = corpus, tree.nodes
        self.tokens_T = (
            np.concatenate([n.tokens for n in self.nodes]).astype(np.int32)
            if self.nodes
            else np.zeros(0, np.int32)
        )
        end = [n.first_token + n.num_tokens for n in self.nodes]
        for node in reversed(self.nodes):
            if node.parent >= 0:
                end[node.parent] = max(end[node.parent], end[node.index])
        self.subtree_end = end
        """Exclusive end of each node's subtree among the tree's tokens."""
        self.roots = tuple(n.index for n in self.nodes if n.parent < 0)
        self.is_loss_T = np.zeros(len(self.tokens_T), bool)
        """Whether some sequence has loss on a token."""
        self.is_prompt_T = np.zeros(len(self.tokens_T), bool)
        """Whether some sequence has it without loss."""
        for i in range(len(corpus)):
            if corpus.loss_spans[i] is None:
                continue
            index, mask = tree.token_indices(i), corpus.mask(i)
            self.is_loss_T[index[mask]] = True
            self.is_prompt_T[index[~mask]] = True

    def subtree_tokens(self, node: int) -> int:
        return self.subtree_end[node] - self.nodes[node].first_token

    def num_sequences_below(self, node: int) -> int:
        """Return how many sequences end at or below a node."""
        first, last = node, self._last_node[node]
        return int(self._ends_before[last + 1] - self._ends_before[first])

    @cached_property
    def _last_node(self) -> list[int]:
        last = list(range(len(self.nodes)))
        for node in reversed(self.nodes):
            if node.parent >= 0:
                last[node.parent] = max(last[node.parent], last[node.index])
        return last

    @cached_property
    def _ends_before(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(n.sequences) for n in self.nodes)])

    def sequences_below(self, node: int) -> Iterator[int]:
        """Yield the sequences that end at or below a node."""
        for n in self.nodes[node : self._last_node[node] + 1]:
            yield from n.sequences

    def path_tokens(self, node: int, limit: int) -> NDArray[np.int32]:
        """Return the last tokens above a node, at most ``limit``."""
        parts: list[NDArray[np.int32]] = []
        above, left = self.nodes[node].parent, limit
        while above >= 0 and left > 0:
            n = self.nodes[above]
            end = n.first_token + n.num_tokens
            parts.append(self.tokens_T[max(n.first_token, end - left) : end])
            left -= n.num_tokens
            above = n.parent
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)
