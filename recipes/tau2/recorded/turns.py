"""Tokenizes conversations turn by turn, with stable prefixes.

A turn is one call of the agent's model. Its tokens come in four parts:

    context     what joined the prompt since the previous turn   prompt   stays
    opening     what the template opens the reply with           prompt   dropped
    thinking    thoughts                                         trained  dropped
    completion  content, tool calls, end of turn                 trained  stays

"Dropped" parts are absent from later prompts. The text is what the tokenizer's chat
template renders, and each part is tokenized by itself, as in generation: the prompt
ends where the model begins. So later prompts repeat the ids of earlier completions
exactly. All other cuts lie at control tokens, so the ids of prompts are those of their
whole text (tests/recipes/tau2/test_replay.py checks both).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recipes.replies import Message
from recipes.tau2.recorded.conversation import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = NDArray[np.int32]

# Appended to a turn to see how a later prompt renders it; any user message would do.
_PROBE: Message = {"role": "user", "content": "."}


class Template(StrEnum):
    """How a turn begins."""

    PLAIN = "plain"
    """Includes the reply itself."""
    EMPTY_THINK = "empty-think"
    """Qwen3 with thinking off: the prompt ends with empty thoughts."""
    THINK = "think"
    """The model thinks first. The thoughts are filler: the data has none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Token ids of one model call, in the parts that the module describes."""

    context: TokenIds
    opening: TokenIds
    thinking: TokenIds
    completion: TokenIds


class TurnTokenizer:
    """Splits conversations into turns; caches the ids of each text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Template = Template.PLAIN,
        think_tokens: int = 200,
        seed: int = 0,
    ) -> None:
        """
        Args:
            tokenizer: with a chat template that ends a turn with its `eos_token`.
            think_tokens: average filler tokens per turn; each turn draws between
                half and one and a half times as many.
            seed: seed of the filler.

        Raises:
            ValueError: `think_tokens` is not positive.
        """
        if think_tokens < 1:
            raise ValueError(f"think_tokens={think_tokens}; expected at least 1")
        self._tokenizer = tokenizer
        self._template = template
        self._think_tokens = think_tokens
        self._seed = seed
        self._added_ids = np.array(sorted(tokenizer.added_tokens_decoder), np.int32)
        self._ids_of: dict[str, TokenIds] = {}

    def turns(self, conversation: Conversation, episode: int = 0) -> list[Turn]:
        """Return one turn per call, first to last.

        Args:
            episode: added to the seed, so that every episode has its own filler.

        Raises:
            ValueError: the chat template rewrites what it rendered before, does not
                end turns with the tokenizer's `eos_token`, or has no empty thoughts
                though they are asked for.
        """
        messages, tools = conversation.messages, conversation.tools
        turns: list[Turn] = []
        opening = self._ids("")
        history = ""
        for call, index in enumerate(conversation.calls):
            prompt = self._render(messages[:index], tools)
            context = self._ids(_after(history, prompt))
            if call == 0 and self._template is Template.EMPTY_THINK:
                opening = self._ids(self._opening_text(messages[:index], tools, prompt))
            completion = self._completion_text(messages[: index + 1], tools, prompt)
            thinking = self._ids("")
            if self._template is Template.THINK:
                source = turns[0].context if turns else context
                thinking = self._thinking(source, episode, call)
            turns.append(Turn(context, opening, thinking, self._ids(completion)))
            history = prompt + completion
        return turns

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        generate: bool = True,
        **options: bool,
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generate,
            **options,
        )
        assert isinstance(text, str)
        return text

    def _opening_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], prompt: str
    ) -> str:
        silent = self._render(messages, tools, enable_thinking=False)
        opening = _after(prompt, silent)
        if not opening:
            raise ValueError(
                "the tokenizer's chat template renders the same prompt with "
                f"enable_thinking=False; use --template {Template.PLAIN} with it"
            )
        return opening

    def _completion_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], prompt: str
    ) -> str:
        """Return the last message as later prompts show it, with its end token."""
        end = self._tokenizer.eos_token
        shown = _after(prompt, self._render([*messages, _PROBE], tools, generate=False))
        if end not in shown:
            raise ValueError(
                "the tokenizer's chat template does not end a turn with its "
                f"eos_token {end!r}; pass the tokenizer of a chat model"
            )
        return shown[: shown.index(end) + len(end)]

    def _thinking(self, source: TokenIds, episode: int, call: int) -> TokenIds:
        """Draw filler thoughts from the ids of `source`, between Qwen3's marks."""
        rng = np.random.default_rng([self._seed, episode, call])
        half = self._think_tokens // 2
        num_tokens = rng.integers(
            self._think_tokens - half, self._think_tokens + half + 1
        )
        words = source[~np.isin(source, self._added_ids)]
        thoughts = rng.choice(words, num_tokens)
        marks = self._ids("<think>\n"), self._ids("\n</think>\n\n")
        return np.concatenate([marks[0], thoughts, marks[1]])

    def _ids(self, text: str) -> TokenIds:
        if text not in self._ids_of:
            # verbose=False: replayed sequences may be longer than the model takes.
            encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
            self._ids_of[text] = np.array(encoded["input_ids"], np.int32)
        return self._ids_of[text]


def _after(start: str, text: str) -> str:
    if not text.startswith(start):
        raise ValueError(
            "the tokenizer's chat template renders earlier messages differently once "
            "others follow, so prompts would share no prefixes; pass a tokenizer whose "
            "template only appends"
        )
    return text[len(start) :]


def call_sequence(turns: Sequence[Turn]) -> tuple[TokenIds, NDArray[np.bool_]]:
    """Join prompt and reply of the last of `turns`; the loss is on that reply.

    Returns:
        Token ids and loss mask, both ``[length]``; ``mask[t]``: token t is trained.
    """
    *earlier, last = turns
    prompt = [part for turn in earlier for part in (turn.context, turn.completion)]
    prompt += [last.context, last.opening]
    return _join(prompt, [last.thinking, last.completion])


def conversation_sequence(turns: Sequence[Turn]) -> tuple[TokenIds, NDArray[np.bool_]]:
    """Join all of `turns` to one sequence; the loss is on every reply.

    Openings and thoughts stay in, unlike in later prompts: in AReaL's export style
    "concat" each prompt appends to the tokens before it.

    Returns:
        Token ids and loss mask, see `call_sequence`.
    """
    pieces = [
        _join([turn.context, turn.opening], [turn.thinking, turn.completion])
        for turn in turns
    ]
    tokens, masks = zip(*pieces, strict=True)
    return np.concatenate(tokens), np.concatenate(masks)


def _join(
    prompt: Sequence[TokenIds], reply: Sequence[TokenIds]
) -> tuple[TokenIds, NDArray[np.bool_]]:
    tokens = np.concatenate([*prompt, *reply])
    mask = np.zeros(len(tokens), np.bool_)
    mask[sum(map(len, prompt)) :] = True
    return tokens, mask
