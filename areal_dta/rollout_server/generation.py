"""Batched generation with a Transformers model: the decode loop of the local server.

Requests join and leave between any two steps. A newcomer's prompt, but for its last
token, is looked up in the prefix cache; what is new there is prefilled in pieces. One
step is one forward over the newest token of every row and over at most
`max_prefill_tokens` tokens of such pieces, and one draw per row. So a long prompt holds
nobody up for longer than its pieces take, and pausing between steps is pausing within a
token. A row's first step is the one that completes its prompt.

Nothing here knows of threads or HTTP: `generation_thread.py` owns a `BatchGenerator`
and is the only one to call it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_dta.executor.checks.attention_profile import profile_attention
from areal_dta.executor.model_refusals import UnsupportedModelError, model_inputs
from areal_dta.rollout_server.answers import Answer, Decoder
from areal_dta.rollout_server.kv_cache import Row, RowTails
from areal_dta.rollout_server.packed_attention import (
    CopiedPrefix,
    Piece,
    SharedNodes,
    Step,
    attending,
    measure_kv,
)
from areal_dta.rollout_server.prefix_cache import KV, Node, PrefixCache
from areal_dta.rollout_server.sampling import BatchSampling, prompt_logprobs, sample
from areal_dta.rollout_server.states import RowStates, WholePrompts
from areal_dta.rollout_server.weights import vocab_size

# Shorter prompts are copied into their rows: one call of attention takes as long as
# reading the K/V of about so many tokens.
_MIN_SHARED_TOKENS = 128


class BatchGenerator:
    """The running batch. Not thread-safe."""

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int,
        max_cached_tokens: int,
        max_prefill_tokens: int,
        prefix_cache_bytes: int = 0,
        load_decoder: Callable[[], Decoder] | None = None,
    ) -> None:
        """Start with an empty batch; calls the model a few times.

        Raises:
            UnsupportedModelError: its attention cannot be split at a prefix.
        """
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_cached_tokens = max_cached_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self._load_decoder = load_decoder
        self._decoder: Decoder | None = None
        self._vocab_size = vocab_size(model)
        try:
            self._layers = profile_attention(model, find_randomness=False)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{error} (a server that shares prefixes has the same limits); here: "
                "use rollout.backend=sglang"
            ) from error
        shape = measure_kv(model, self._inputs([0], [0]))
        # One request at a time is for answers that are equal to the last bit. How a
        # prefix was cut into pieces shows in its last bits, so none may be kept.
        budget = prefix_cache_bytes if max_batch_size > 1 else 0
        self._states = RowStates(model)
        # Nobody knows the state inside a prompt, so none can be cut.
        cache_class = WholePrompts if self._states.layers else PrefixCache
        self.prefix_cache = cache_class(shape, budget)
        self._tails = RowTails(shape)
        # Columns of a tail must be in order where a window cuts some off.
        has_windows = any(layer.window is not None for layer in self._layers.values())
        self._min_shared_tokens = 0 if has_windows else _MIN_SHARED_TOKENS
        self._decoding: list[Row] = []
        self._prefilling: list[Row] = []
        #: Rows that the step under way lets in, or computes a piece for.
        self._newcomers: list[Row] = []
        self._sampling: BatchSampling | None = None
        self._shared: tuple[int, SharedNodes] | None = None

    @property
    def rows(self) -> Sequence[Answer]:
        """All admitted requests."""
        return [row.answer for row in (*self._decoding, *self._prefilling)]

    @property
    def num_kv_bytes(self) -> int:
        """Bytes of all keys and values, and of rows' states."""
        cache = self.prefix_cache
        tokens = cache.num_used_tokens + cache.num_unused_tokens + self._tails.capacity
        return tokens * cache.shape.bytes_per_token + self._states.num_bytes

    @torch.inference_mode()
    def admit(self, answers: Sequence[Answer]) -> int:
        """Add the first of these requests to the batch, as many as fit.

        Room is set aside for the longest possible answers, so that no step ever finds
        the cache full. A lone request always fits.

        Returns:
            How many were added.

        Raises:
            Exception: whatever the model raised. Requests that are not in `rows` then
                were not admitted; the others are not affected.
        """
        for count, answer in enumerate(answers):
            size = len(answer.prefix)
            row = Row(
                answer,
                self.prefix_cache.root,
                num_copied=size if size < self._min_shared_tokens else 0,
            )
            if not self._has_room(row):
                return count
            # Scores of a prompt need its logits, which the prefill leaves out.
            if answer.task.prompt_logprobs_from is not None:
                answer.prompt_logprobs = prompt_logprobs(
                    self.model, answer.task.prompt, answer.task.prompt_logprobs_from
                )
            row.node, answer.num_cached_tokens = self.prefix_cache.acquire(
                answer.prefix
            )
            self._prefilling.append(row)
        return len(answers)

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Go on with all prompts, give every other row one more token.

        Returns:
            The rows that are done.

        Raises:
            Exception: whatever the model raised; call `drop_failed` before going on.
        """
        # Choose the pieces of prompts, and the rows whose prompts are complete then.
        pieces, joining = self._choose_pieces()
        rows = [*self._decoding, *joining]
        cache, tails, device = self.prefix_cache, self._tails, self.model.device
        lengths = tails.lengths + [row.num_copied for row in joining]
        if rows:
            tails.reserve(
                len(rows),
                max(lengths) + 1,
                max(row.max_columns for row in rows),
                self.max_cached_tokens - cache.num_used_tokens,
            )

        # One forward over every row's newest token, and the pieces behind them.
        tokens = [row.answer.newest_token for row in rows]
        positions = [row.answer.length - 1 for row in rows]
        for piece in pieces:
            first = piece.node.start + piece.start
            positions += range(first, first + piece.end - piece.start)
            tokens += piece.node.tokens[piece.start : piece.end].tolist()
        paths = [[] if row.num_copied else row.node.path() for row in rows]
        step = Step(
            num_tokens=len(tokens),
            layers=self._layers,
            tails=tails,
            lengths=lengths,
            positions=positions[: len(rows)],
            paths=paths,
            shared=self._share(paths, bool(joining)),
            pieces=pieces,
            copied=self._copied(joining),
        )
        joined = [row.node for row in joining]
        states = self._states.enter(len(self._decoding), joined, pieces)
        with attending(self.model, step), self._states.carried(states):
            logits = self.model(
                **self._inputs(tokens, positions),
                logits_to_keep=torch.arange(len(rows), device=device),
            ).logits[0]

        # Nothing has failed: make it the new state.
        for piece in pieces:
            piece.node.num_filled = piece.end
        self._states.leave(states)
        tails.lengths = [length + 1 for length in lengths]
        self._decoding = rows
        if joining:
            ended = set(map(id, joining))
            self._prefilling = [r for r in self._prefilling if id(r) not in ended]
            self._sampling = None
            for row in joining:
                if not row.num_copied:
                    cache.join_chain(row.node)
        self._newcomers = []
        if not rows:
            return []

        # Draw one token per row. Until min_new_tokens a row may not draw what stops it.
        answers = [row.answer for row in rows]
        if self._sampling is None:
            self._sampling = BatchSampling.build(
                [answer.task.sampling for answer in answers], self._vocab_size, device
            )
        drawn, logprobs = sample(
            logits,
            self._sampling,
            [answer.rng.random() for answer in answers],
            [
                (i, tuple(answer.task.stop_token_ids))
                for i, answer in enumerate(answers)
                if len(answer.tokens) < answer.task.min_new_tokens
                and answer.task.stop_token_ids
            ],
        )

        # Append the tokens, and take finished rows out of the batch.
        done = []
        for i, answer in enumerate(answers):
            answer.append(drawn[i], logprobs[i], self.decoder)
            if answer.finish is not None or answer.error is not None:
                done.append(i)
        return self._remove(done)

    @torch.inference_mode()
    def drop_failed(self, error: Exception) -> list[Answer]:
        """Drop what a failed step was about, and return it with `error` set.

        A failed forward leaves the state as it was before the step. Newcomers are the
        first to be suspected; without any, everything goes.
        """
        what = "prefill" if self._newcomers else "forward"
        rows = self._newcomers or [*self._decoding, *self._prefilling]
        answers = self.drop([row.answer for row in rows])
        for answer in answers:
            answer.error = f"the {what} failed: {error!r}"
        return answers

    @torch.inference_mode()
    def abort_all(self) -> list[Answer]:
        """Stop all rows, and return them with their partial answers."""
        answers = self.drop(self.rows)
        for answer in answers:
            answer.abort()
        return answers

    @torch.inference_mode()
    def drop(self, answers: Iterable[Answer]) -> list[Answer]:
        """Take rows out of the batch as they are."""
        dropped = set(map(id, answers))
        for row in self._prefilling:
            if id(row.answer) in dropped:
                self.prefix_cache.release(row.node)
        gone = [r.answer for r in self._prefilling if id(r.answer) in dropped]
        self._prefilling = [r for r in self._prefilling if id(r.answer) not in dropped]
        self._newcomers = []
        rows = [i for i, r in enumerate(self._decoding) if id(r.answer) in dropped]
        return self._remove(rows) + gone

    def clear(self) -> list[Answer]:
        """Forget all rows and prefixes, free their memory; return the rows."""
        answers = self.drop(self.rows)
        self.drop_prefixes()
        self._tails.clear()
        self._states.clear()
        return answers

    def drop_prefixes(self) -> None:
        """Forget all cached prefixes, which is needed when the weights change.

        The batch must be empty.
        """
        self.prefix_cache.clear()

    def decoder(self) -> Decoder:
        """Return the tokenizer, which is loaded on first use.

        Raises:
            ValueError: there is none.
        """
        if self._decoder is None:
            if self._load_decoder is None:
                raise ValueError("this server has no tokenizer; use stop_token_ids.")
            self._decoder = self._load_decoder()
        return self._decoder

    def _has_room(self, row: Row) -> bool:
        rows = [*self._decoding, *self._prefilling, row]
        if len(rows) == 1:
            return True
        columns = max(row.max_columns for row in rows)
        cache = self.prefix_cache
        used = cache.num_used_tokens + cache.num_new_tokens(row.answer.prefix)
        return (
            len(rows) <= self.max_batch_size
            and used + len(rows) * columns <= self.max_cached_tokens
        )

    def _inputs(self, tokens: list[int], positions: list[int]) -> dict[str, Any]:
        device = self.model.device
        return model_inputs(
            self.model,
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
        )

    def _choose_pieces(self) -> tuple[list[Piece], list[Row]]:
        """Return what to prefill in this step, and the rows that can join it."""
        # First come, first served; each node has to be computed after those above.
        chosen: list[tuple[Node, int, int, tuple[Node, ...]]] = []
        filled: dict[int, int] = {}
        joining = []
        self._newcomers = []
        budget = self.max_prefill_tokens
        for row in self._prefilling:
            path, had = row.node.path(), len(chosen)
            is_complete = True
            for i, node in enumerate(path):
                start = filled.get(id(node), node.num_filled)
                end = start + min(budget, node.num_tokens - start)
                if end > start:
                    chosen.append((node, start, end, tuple(path[:i])))
                    filled[id(node)] = end
                    budget -= end - start
                if end < node.num_tokens:
                    is_complete = False
                    break
            if is_complete:
                joining.append(row)
            if is_complete or len(chosen) > had:
                self._newcomers.append(row)
        pieces, first = [], len(self._decoding) + len(joining)
        for node, start, end, above in chosen:
            pieces.append(Piece(node, start, end, first, above))
            first += end - start
        return pieces, joining

    def _copied(self, joining: list[Row]) -> list[CopiedPrefix]:
        """Group the joining rows whose prefix is copied by that prefix."""
        groups: dict[int, CopiedPrefix] = {}
        for i, row in enumerate(joining, len(self._decoding)):
            if row.num_copied:
                if id(row.node) not in groups:
                    nodes = tuple(row.node.path())
                    groups[id(row.node)] = CopiedPrefix(nodes, [])
                groups[id(row.node)].rows.append(i)
        return list(groups.values())

    def _share(self, paths: list[list[Node]], is_new: bool) -> SharedNodes:
        version = self.prefix_cache.version
        if self._shared is None or is_new or self._shared[0] != version:
            self._shared = version, SharedNodes(paths, self.model.device)
        return self._shared[1]

    def _copy_row(self, row: int, first: int, start: int, end: int) -> KV:
        """Copy positions [start, end) of a row whose column 0 is position `first`."""
        return self._tails.copy_row(row, start - first, end - first)

    def _remove(self, indices: Sequence[int]) -> list[Answer]:
        """Take rows out of the batch; what they have computed may be kept."""
        if not indices:
            return []
        removed = [self._decoding[i] for i in indices]
        for i, row in zip(indices, removed, strict=True):
            answer = row.answer
            if answer.error is None and self.prefix_cache.max_unused_bytes:
                first = len(answer.prefix) - row.num_copied  # position of column 0
                computed = answer.task.prompt[-1:] + tuple(answer.tokens[:-1])
                self.prefix_cache.insert(
                    np.concatenate([answer.prefix, computed]),
                    first,
                    partial(self._copy_row, i, first),
                )
            self.prefix_cache.release(row.node)
        unclean = [i for i in indices if self._decoding[i].answer.error is not None]
        order = self._tails.remove(list(indices), unclean)
        self._states.reorder(order)
        self._decoding = [self._decoding[i] for i in order]
        self._sampling = None
        self._shared = None
        return [row.answer for row in removed]
