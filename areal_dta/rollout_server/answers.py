"""Requests resolved against the model, and the answers to them as they grow."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from areal_dta.rollout_server.prefix_cache import TokenArray
from areal_dta.rollout_server.protocol import FinishReason
from areal_dta.rollout_server.sampling import RowSampling

#: AReaL's client recognises an abort without tokens by the start of this message.
ABORTED_BEFORE_PREFILL = "Abort before prefill"
ABORTED = "Abort: generation was paused"


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
    #: Tokens of the prompt whose K/V were in the prefix cache, or on their way there.
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    rng: random.Random = field(init=False)
    #: The prompt without its last token, which is the input of the first step.
    prefix: TokenArray = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = np.array(self.task.prompt[:-1], np.int64)
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

    def append(
        self, token: int, logprob: float, load_decoder: Callable[[], Decoder]
    ) -> None:
        """Append a drawn token; sets `finish` or `error` where it is the last one."""
        if math.isnan(logprob):  # says that nothing could be drawn
            self.error = (
                "no token could be drawn: the model's logits are not finite, or "
                "min_new_tokens forbids every token."
            )
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        task = self.task
        # A stop counts before the length: the last token may be both.
        if len(self.tokens) >= task.min_new_tokens:
            if token in task.stop_token_ids:
                self.finish = FinishReason("stop", token)
                return
            if (matched := self._matched_stop_string(load_decoder)) is not None:
                self.finish = FinishReason("stop", matched)
                return
        if self.num_remaining <= 0:
            self.finish = FinishReason("length", task.max_new_tokens)

    def _matched_stop_string(self, load_decoder: Callable[[], Decoder]) -> str | None:
        if not self.task.stop_strings:
            return None
        # A token holds at least one byte of text, so this tail holds any match that
        # ends in the newest token. The margin is a character of up to four bytes.
        window = max(len(text.encode()) for text in self.task.stop_strings) + 4
        text = load_decoder().decode(self.tokens[-window:], skip_special_tokens=False)
        return next((stop for stop in self.task.stop_strings if stop in text), None)
