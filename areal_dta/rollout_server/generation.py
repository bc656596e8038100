"""Batched generation with a Transformers model: the decode loop of the local server.

Requests join and leave between any two steps. A newcomer's prompt, but for its last
token, is prefilled (equal prompts once: GRPO sends every prompt n_samples times) and
copied into the running cache; its last token then takes part in the next decode step
like everybody else's newest token. One step is one forward of [rows, 1] and one draw
per row, so pausing between steps is pausing within a token.

Nothing here knows of threads or HTTP: `generation_thread.py` owns a `BatchGenerator`
and is the only one to call it.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from areal_dta.rollout_server.kv_cache import RowCache
from areal_dta.rollout_server.protocol import FinishReason
from areal_dta.rollout_server.sampling import BatchSampling, RowSampling, sample
from areal_dta.rollout_server.weights import vocab_size

#: AReaL's client recognises an abort without tokens by the start of this message.
ABORTED_BEFORE_PREFILL = "Abort before prefill"
ABORTED = "Abort: generation was paused"
_LOGPROB_CHUNK = 1024


class GenerationError(RuntimeError):
    """One request could not be generated; the others are not affected."""


class Decoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """One request, with everything resolved against the model."""

    prompt: tuple[int, ...]
    sampling: RowSampling
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    seed: int | str
    #: How many numbers of that seed's stream earlier parts of the answer have used.
    num_drawn: int = 0
    #: Also return the logprobs of the prompt's tokens after this position.
    prompt_logprobs_from: int | None = None


@dataclass(eq=False, slots=True)
class Answer:
    """State of one request, and its result once `finish` or `error` is set."""

    task: GenerationTask
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: Logprobs of prompt[from + 1:], at temperature 1.
    prompt_logprobs: list[float] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.task.seed)
        for _ in range(self.task.num_drawn):
            self.rng.random()

    @property
    def newest_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.task.prompt[-1]

    @property
    def length(self) -> int:
        return len(self.task.prompt) + len(self.tokens)

    @property
    def num_remaining(self) -> int:
        return self.task.max_new_tokens - len(self.tokens)

    def abort(self) -> None:
        self.finish = FinishReason(
            "abort", ABORTED if self.tokens else ABORTED_BEFORE_PREFILL
        )


class BatchGenerator:
    """The running batch. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int,
        max_cached_tokens: int,
        max_prefill_tokens: int,
        load_decoder: Callable[[], Decoder] | None = None,
    ) -> None:
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_cached_tokens = max_cached_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self._load_decoder = load_decoder
        self._decoder: Decoder | None = None
        self._cache: RowCache | None = None
        self._rows: list[Answer] = []
        self._sampling: BatchSampling | None = None
        self._vocab_size = vocab_size(model)

    @property
    def rows(self) -> Sequence[Answer]:
        return self._rows

    def num_admissible(self, waiting: Sequence[Answer]) -> int:
        """Return how many of the first waiting requests fit into the batch now.

        Room is set aside for the longest possible answer, so that no step ever finds
        the cache full. A lone request always fits.
        """
        # All rows share one right edge, so a batch takes rows x (edge + longest
        # answer) columns; a newcomer may push the edge and the answer further out.
        edge = self._cache.edge if self._cache is not None and self._rows else 0
        ahead = max((row.num_remaining for row in self._rows), default=0)
        count = 0
        for answer in waiting:
            edge = max(edge, len(answer.task.prompt))
            ahead = max(ahead, answer.num_remaining)
            rows = len(self._rows) + count + 1
            if rows > self.max_batch_size:
                break
            if rows > 1 and rows * (edge + ahead) > self.max_cached_tokens:
                break
            count += 1
        return count

    @torch.inference_mode()
    def admit(self, answers: Sequence[Answer]) -> None:
        """Prefill these requests and add them to the batch.

        Raises:
            Exception: whatever the model raised. Requests that are not in `rows` then
                were not admitted; the others are not affected.
        """
        # Scores of a prompt need its logits, which the prefill leaves out.
        for answer in answers:
            if answer.task.prompt_logprobs_from is not None:
                answer.prompt_logprobs = self._score_prompt(answer.task)
        for group in self._split_prefill(answers):
            # Prefill each distinct prompt once, without its last token, which is the
            # input of the row's first decode step.
            prefixes = [answer.task.prompt[:-1] for answer in group]
            distinct = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
            prefill = self._prefill(list(distinct))
            # Copy the prefill to every row; only now are the rows part of the batch,
            # so that a failed forward leaves no row half admitted.
            if self._cache is None:
                self._cache = RowCache(prefill)
            self._cache.insert(
                prefill,
                [distinct[prefix] for prefix in prefixes],
                [len(prefix) for prefix in prefixes],
            )
            self._rows += group
            self._sampling = None

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Give every row one more token, and return the rows that are done.

        Raises:
            Exception: whatever the model raised; call `clear` before going on.
        """
        # Reserve the column of the new tokens, and mask what lies before a row's start.
        assert self._rows and self._cache is not None
        cache, device = self._cache, self.model.device
        cache.reserve_column()
        starts = torch.tensor(cache.starts, device=device)[:, None]
        mask = None
        if any(cache.starts):
            mask = torch.arange(cache.edge + 1, device=device) >= starts

        # One forward over every row's newest token.
        logits = self.model(
            input_ids=torch.tensor(
                [[row.newest_token] for row in self._rows], device=device
            ),
            position_ids=cache.edge - starts,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        cache.advance()

        # Draw one token per row. Until min_new_tokens a row may not draw what stops it.
        if self._sampling is None:
            self._sampling = BatchSampling.build(
                [row.task.sampling for row in self._rows], self._vocab_size, device
            )
        tokens, logprobs = sample(
            logits,
            self._sampling,
            [row.rng.random() for row in self._rows],
            [
                (i, tuple(row.task.stop_token_ids))
                for i, row in enumerate(self._rows)
                if len(row.tokens) < row.task.min_new_tokens and row.task.stop_token_ids
            ],
        )

        # Append the tokens, and take finished rows out of the batch.
        done = []
        for i, row in enumerate(self._rows):
            self._append(row, tokens[i], logprobs[i])
            if row.finish is not None or row.error is not None:
                done.append(i)
        return self._remove(done)

    @torch.inference_mode()
    def abort_all(self) -> list[Answer]:
        """Stop all rows, and return them with their partial answers."""
        for row in self._rows:
            row.abort()
        return self._remove(range(len(self._rows)))

    @torch.inference_mode()
    def drop(self, answers: Iterable[Answer]) -> None:
        """Forget rows that nobody waits for."""
        dropped = set(map(id, answers))
        self._remove([i for i, row in enumerate(self._rows) if id(row) in dropped])

    def clear(self) -> list[Answer]:
        """Forget all rows, free the cache, and return the rows as they are."""
        rows, self._rows = self._rows, []
        self._cache = None
        self._sampling = None
        return rows

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

    def _remove(self, indices: Sequence[int]) -> list[Answer]:
        if not indices:
            return []
        assert self._cache is not None
        removed = [self._rows[i] for i in indices]
        if len(removed) == len(self._rows):
            self._cache.clear()
            self._rows = []
        else:
            order = self._cache.remove(list(indices))
            self._rows = [self._rows[i] for i in order]
        self._sampling = None
        return removed

    def _split_prefill(self, answers: Sequence[Answer]) -> list[list[Answer]]:
        """Split into groups whose padded prompts stay below `max_prefill_tokens`."""
        # Shortest first, so that prompts of one group are about equally long; equal
        # prompts count once.
        groups: list[list[Answer]] = []
        distinct: set[tuple[int, ...]] = set()
        longest = 0
        for answer in sorted(answers, key=lambda a: len(a.task.prompt)):
            prompt = answer.task.prompt
            longest = max(longest, len(prompt))
            size = longest * (len(distinct) + (prompt not in distinct))
            if not groups or size > self.max_prefill_tokens:
                groups.append([])
                distinct, longest = set(), len(prompt)
            distinct.add(prompt)
            groups[-1].append(answer)
        return groups

    def _prefill(self, prefixes: list[tuple[int, ...]]) -> DynamicCache:
        """Compute keys and values [U, H, longest, D]; each prompt is left-aligned.

        The padding is on the right, where causal attention ignores it, so no mask is
        needed. It repeats the prompt's last token: attention kernels multiply what
        they ignore by zero, so it must be finite where the prompt is. Empty prefixes
        get a throw-away column.
        """
        longest = max(1, max(map(len, prefixes)))
        padded = [p + (p or (0,))[-1:] * (longest - len(p)) for p in prefixes]
        cache = DynamicCache()
        self.model(
            input_ids=torch.tensor(padded, device=self.model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cache

    def _score_prompt(self, task: GenerationTask) -> list[float]:
        """Return the logprobs of prompt[from + 1:], each given everything before it."""
        assert task.prompt_logprobs_from is not None
        tokens = torch.tensor([task.prompt], device=self.model.device)
        labels = tokens[0, task.prompt_logprobs_from + 1 :]
        if not len(labels):
            return []
        logits = self.model(
            input_ids=tokens, use_cache=False, logits_to_keep=len(labels) + 1
        ).logits[0, :-1]
        # In chunks: fp32 logprobs of a whole prompt would be the largest tensor here.
        logprobs: list[float] = []
        for first in range(0, len(labels), _LOGPROB_CHUNK):
            chunk = slice(first, first + _LOGPROB_CHUNK)
            picked = torch.log_softmax(logits[chunk].float(), dim=-1).gather(
                1, labels[chunk, None]
            )
            logprobs += picked[:, 0].tolist()
        return logprobs

    def _append(self, row: Answer, token: int, logprob: float) -> None:
        if math.isnan(logprob):  # says that nothing could be drawn
            row.error = (
                "no token could be drawn: the model's logits are not finite, or "
                "min_new_tokens forbids every token."
            )
            return
        row.tokens.append(token)
        row.logprobs.append(logprob)
        task = row.task
        # A stop counts before the length: the last token may be both.
        if len(row.tokens) >= task.min_new_tokens:
            if token in task.stop_token_ids:
                row.finish = FinishReason("stop", token)
                return
            if (matched := self._matched_stop_string(row)) is not None:
                row.finish = FinishReason("stop", matched)
                return
        if row.num_remaining <= 0:
            row.finish = FinishReason("length", task.max_new_tokens)

    def _matched_stop_string(self, row: Answer) -> str | None:
        if not row.task.stop_strings:
            return None
        # A token holds at least one byte of text, so this tail holds any match that
        # ends in the newest token. The margin is a character of up to four bytes.
        window = max(len(text.encode()) for text in row.task.stop_strings) + 4
        text = self.decoder().decode(row.tokens[-window:], skip_special_tokens=False)
        return next((stop for stop in row.task.stop_strings if stop in text), None)
