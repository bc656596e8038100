"""Finds forks of the tree that need not be there, and what they cost.

At each fork, what follows one child is aligned with what follows another. Where both
agree again behind a difference that has a removable reason (``causes``), the tokens
that the two subtrees have in common behind it are computed twice for nothing. They are
counted exactly, by walking both subtrees at once.

Forks between replies that were sampled are meant, and are not looked at.

Invariants, and the test that holds them (tests/inspect/test_lost_sharing.py): a planted
difference is found at its position, and its price is what the tree loses when the
difference is taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_dta.inspect.alignment import is_moved, readings
from areal_dta.inspect.causes import ADVICE, Difference, Kind, cause
from areal_dta.inspect.corpus import FlatTree
from areal_dta.inspect.rollouts.text import TextTokenizer
from areal_dta.tree.prefix_tree import common_prefix

MIN_TOKENS: Final = 8
"""A fork, or a reason, that costs fewer tokens is not reported."""
_WINDOW: Final = 8192  # tokens behind a fork that are aligned
_MAX_COMPARISONS: Final = 4000
_MAX_ALIGNED: Final = 40_000_000  # tokens in all: some ten seconds
_MAX_DIFFERENCES: Final = 64  # behind one fork
_MAX_SIBLINGS: Final = 4  # with which a child is compared
_CONTEXT: Final = 48  # tokens shown around a difference
_MAX_SHOWN: Final = 240  # characters of a text that are shown

Ids = NDArray[np.int32]


@dataclass(slots=True)
class Finding:
    """One reason for lost sharing, over all forks that it makes."""

    kind: Kind
    role: str
    position: int
    """Token position of the fork that costs most."""
    before: str
    a: str
    b: str
    after: str
    where: tuple[str, str]
    """Files and lines of two sequences that part there."""
    node: int = -1
    """Node of the tree that begins with the difference, of the costliest fork."""
    num_forks: int = 0
    num_sequences: int = 0
    """Sequences in the smaller of the subtrees that part."""
    num_tokens: int = 0
    """Tree tokens that would not be there without the difference."""
    _most: int = field(default=0, repr=False)

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]


@dataclass(frozen=True, slots=True)
class LostSharing:
    findings: tuple[Finding, ...]
    """The costliest first."""
    num_forks: int
    """Forks that were looked at."""
    num_left_out: int
    """Comparisons that were left out since there were too many."""
    min_tokens: int
    """What costs fewer tokens is not reported."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the tree: the next token is token ``offset`` of the node."""

    node: int
    offset: int


class _Path:
    """What follows a child of a fork along the heaviest branches."""

    def __init__(self, flat: FlatTree, child: int) -> None:
        self.flat = flat
        self.nodes: list[int] = []
        self.starts: list[int] = []  # tokens before each node, from the fork on
        parts: list[Ids] = []
        length, node = 0, child
        while True:
            n = flat.nodes[node]
            self.nodes.append(node)
            self.starts.append(length)
            parts.append(flat.tokens_T[n.first_token : n.first_token + n.num_tokens])
            length += n.num_tokens
            if not n.children or length >= _WINDOW:
                break
            node = max(n.children, key=flat.subtree_tokens)
        self.tokens = np.concatenate(parts)[:_WINDOW]

    def place(self, position: int) -> _Place:
        """Return the place of token ``position`` behind the fork."""
        i = int(np.searchsorted(self.starts, position, side="right")) - 1
        return _Place(self.nodes[i], position - self.starts[i])


class SharingSearch:
    """Searches a tree; ``run`` returns what it found."""

    def __init__(
        self,
        flat: FlatTree,
        tokenizer: TextTokenizer | None,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        self._flat, self._tokenizer = flat, tokenizer
        self._min_tokens = min_tokens
        self._findings: dict[tuple[object, ...], Finding] = {}
        self._paths: dict[int, _Path] = {}
        self._num_aligned = 0

    def run(self) -> LostSharing:
        pairs = sorted(self._pairs(), key=lambda pair: -pair[0])
        num_left_out = 0
        forks = set()
        for number, (_, parent, child, siblings) in enumerate(pairs):
            if number == _MAX_COMPARISONS or self._num_aligned > _MAX_ALIGNED:
                num_left_out = len(pairs) - number
                break
            forks.add(parent)
            self._compare(child, siblings)
            if len(self._paths) > 256:
                self._paths.clear()
        least = self._min_tokens
        found = [f for f in self._findings.values() if f.num_tokens >= least]
        found.sort(key=lambda f: -f.num_tokens)
        return LostSharing(tuple(found), len(forks), num_left_out, least)

    def _pairs(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield a bound of what can be lost, the fork, a child, and its siblings."""
        flat = self._flat
        forks = [(-1, flat.roots)]
        forks += [(n.index, n.children) for n in flat.nodes]
        for parent, children in forks:
            if len(children) < 2:
                continue
            ranked = sorted(children, key=lambda c: (-flat.subtree_tokens(c), c))
            for rank, child in enumerate(ranked[1:], start=1):
                siblings = [s for s in ranked[:rank] if self._may_merge(s, child)]
                bound = flat.subtree_tokens(child)
                if siblings and bound >= MIN_TOKENS:
                    yield bound, parent, child, siblings

    def _may_merge(self, a: int, b: int) -> bool:
        """Return whether two children part for another reason than sampling."""
        flat = self._flat
        first = flat.nodes[a].first_token, flat.nodes[b].first_token
        return not (flat.is_loss_T[first[0]] and flat.is_loss_T[first[1]])

    def _path(self, child: int) -> _Path:
        if child not in self._paths:
            self._paths[child] = _Path(self._flat, child)
        return self._paths[child]

    def _compare(self, child: int, siblings: list[int]) -> None:
        """Note what a child loses by parting from the sibling that it fits best."""
        episodes = self._episodes(child)
        # Those of its own episode first: their history is the child's own.
        siblings = sorted(
            siblings[: 16 * _MAX_SIBLINGS],
            key=lambda s: not (episodes and episodes & self._episodes(s)),
        )[:_MAX_SIBLINGS]
        best: list[tuple[Kind, Difference, int, int]] = []
        best_sibling, most = -1, 0
        for sibling in siblings:
            is_same = bool(episodes and episodes & self._episodes(sibling))
            losses = self._losses(sibling, child, is_same)
            total = sum(tokens for *_, tokens in losses)
            if total > most:
                best, best_sibling, most = losses, sibling, total
        for kind, difference, position, tokens in best:
            self._note(kind, difference, position, tokens, best_sibling, child)

    def _losses(
        self, sibling: int, child: int, is_same_episode: bool
    ) -> list[tuple[Kind, Difference, int, int]]:
        """Return kind, texts, position and price of each removable difference."""
        one, other = self._path(sibling), self._path(child)
        losses: list[tuple[Kind, Difference, int, int]] = []
        at_a = at_b = 0
        while len(losses) < _MAX_DIFFERENCES:
            # Aligned anew behind each difference: passages may have moved there too.
            rest_a, rest_b = one.tokens[at_a:], other.tokens[at_b:]
            self._num_aligned += len(rest_a) + len(rest_b)
            found = None
            for chain in readings(rest_a, rest_b):
                block = chain[0]
                has_moved = is_moved(block, rest_a, rest_b)
                matching = sum(b.length for b in chain) + has_moved * block.b
                span = (at_a, at_a + block.a), (at_b, at_b + block.b)
                difference = self._difference(
                    one, other, span, block.length, matching, is_same_episode
                )
                if (kind := cause(difference)) is None:
                    continue
                tokens = self._common(one.place(span[0][1]), other.place(span[1][1]))
                if has_moved or (block.a and block.b):
                    tokens += min(block.a, block.b)  # it would be one text
                found = kind, difference, block, tokens
                if kind is not Kind.SYSTEM:  # another reading may know a better reason
                    break
            if found is None:
                break
            kind, difference, block, tokens = found
            position = self._flat.nodes[other.nodes[0]].start + at_b
            losses.append((kind, difference, position, tokens))
            at_a, at_b = at_a + block.a + block.length, at_b + block.b + block.length
        return losses

    def _common(self, a: _Place, b: _Place) -> int:
        """Count the tokens that two subtrees have in common from two places on."""
        flat = self._flat
        total, stack = 0, [(a, b)]
        while stack:
            one, other = stack.pop()
            ids_a, ids_b = self._rest(one), self._rest(other)
            shared = common_prefix(ids_a, ids_b)
            total += shared
            ends = shared == len(ids_a), shared == len(ids_b)
            if not any(ends):
                continue
            # Whoever ended continues in its children; the other where it is.
            next_a = (
                [_Place(c, 0) for c in flat.nodes[one.node].children]
                if ends[0]
                else [_Place(one.node, one.offset + shared)]
            )
            next_b = (
                [_Place(c, 0) for c in flat.nodes[other.node].children]
                if ends[1]
                else [_Place(other.node, other.offset + shared)]
            )
            by_token = {self._first(place): place for place in next_a}
            for place in next_b:
                if (token := self._first(place)) in by_token:
                    stack.append((by_token[token], place))
        return total

    def _rest(self, place: _Place) -> Ids:
        n = self._flat.nodes[place.node]
        end = n.first_token + n.num_tokens
        return self._flat.tokens_T[n.first_token + place.offset : end]

    def _first(self, place: _Place) -> int:
        n = self._flat.nodes[place.node]
        return int(self._flat.tokens_T[n.first_token + place.offset])

    def _difference(
        self,
        one: _Path,
        other: _Path,
        span: tuple[tuple[int, int], tuple[int, int]],
        block_length: int,
        matching: int,
        is_same_episode: bool,
    ) -> Difference:
        flat = self._flat
        (a_start, a_end), (b_start, b_end) = span
        before = flat.path_tokens(other.nodes[0], 2048)
        before = np.concatenate([before, other.tokens[:b_start]])
        after = other.tokens[b_end : b_end + min(block_length, _CONTEXT)]
        firsts = [
            flat.nodes[p.node].first_token + p.offset
            for p in (one.place(a_start), other.place(b_start))
        ]
        loss = [bool(flat.is_loss_T[f]) for f in firsts]
        prompt = [bool(flat.is_prompt_T[f]) for f in firsts]
        is_history = (loss[0] and prompt[1]) or (loss[1] and prompt[0])
        ids = one.tokens[a_start:a_end], other.tokens[b_start:b_end]
        return Difference(
            before=self._text(before[-_CONTEXT:]),
            a=self._text(ids[0]),
            b=self._text(ids[1]),
            after=self._text(after),
            role=self._role(before),
            is_first_token=flat.nodes[other.nodes[0]].start + b_start == 0,
            is_history=is_history,
            is_same_episode=is_same_episode,
            is_text=self._tokenizer is not None,
            num_matching=matching,
            num_tokens=(len(ids[0]), len(ids[1])),
            boundaries=(self._num_controls(ids[0]), self._num_controls(ids[1])),
        )

    def _text(self, ids: Ids) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return self._tokenizer.decode(ids)

    def _num_controls(self, ids: Ids) -> int:
        if self._tokenizer is None:
            return 0
        return sum(int(i) in self._tokenizer.control_ids for i in ids)

    def _role(self, before: Ids) -> str:
        """Return the role of the message that the last token belongs to."""
        if self._tokenizer is None or not len(before):
            return ""
        controls = self._tokenizer.control_ids
        for at in range(len(before) - 1, -1, -1):
            if int(before[at]) in controls:
                head = self._tokenizer.decode(before[at : at + 4]).lower()
                for role in ("system", "user", "assistant", "tool", "ipython"):
                    if f">{role}" in head or f">\n{role}" in head:
                        return role
        return ""

    def _episodes(self, child: int) -> set[str]:
        """Return the episodes of the first sequences below a node."""
        found: set[str] = set()
        for number, i in enumerate(self._flat.sequences_below(child)):
            if number >= 64:
                break
            found.add(self._flat.corpus.episodes[i])
        return found - {""}

    def _note(
        self,
        kind: Kind,
        d: Difference,
        position: int,
        tokens: int,
        sibling: int,
        child: int,
    ) -> None:
        flat, where = self._flat, self._flat.corpus.where
        # Forks of one reason differ in position and digits, not in what precedes.
        label = "".join(c for c in d.before[-16:] if not c.isdigit())
        key = kind, d.role, label if kind is Kind.SYSTEM else ""
        finding = self._findings.get(key)
        if finding is None:
            finding = Finding(kind, d.role, 0, "", "", "", "", ("", ""))
            self._findings[key] = finding
        finding.num_forks += 1
        finding.num_tokens += tokens
        finding.num_sequences += min(
            flat.num_sequences_below(child), flat.num_sequences_below(sibling)
        )
        if tokens >= finding._most:
            finding._most = tokens
            finding.position, finding.node = position, child
            finding.before, finding.after = d.before[-_MAX_SHOWN // 3 :], d.after[:80]
            finding.a, finding.b = _short(d.a), _short(d.b)
            first = next(flat.sequences_below(sibling))
            finding.where = where[first], where[next(flat.sequences_below(child))]


def _short(text: str) -> str:
    if len(text) <= _MAX_SHOWN:
        return text
    half = _MAX_SHOWN // 2
    return f"{text[:half]} … {text[-half:]}"
