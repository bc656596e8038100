"""Text to token ids and back, without Transformers: it alone takes seconds to import.

Chat templates are rendered as Transformers does. Texts are cut at control tokens, and
each piece is encoded once: the calls of an episode repeat nearly all of their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from areal_dta.config.composed import one_line

TokenIds = NDArray[np.int32]

DEFAULT_TOKENIZER: Final = "qwen3"
_MAX_CACHED_CHARACTERS = 2**26
_CHECKED_TEXTS = 8  # encoded in one piece as well, to see that pieces give the same


class _Generation(Extension):
    """Block tag with which templates mark what the model writes; shown as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TextTokenizer:
    """A tokenizer with its chat template.

    Raises:
        ValueError: the template cannot be parsed.
    """

    def __init__(
        self,
        backend: Tokenizer,
        name: str,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.backend = backend
        self.has_template = chat_template is not None
        self.end_token = special_tokens.get("eos_token", "")
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.control_ids = frozenset(added)
        self._added = {token.content: i for i, token in added.items()}
        contents = sorted(self._added, key=len, reverse=True)
        pattern = "|".join(map(re.escape, contents))
        self._cut = re.compile(f"({pattern})") if contents else None
        self._num_checked = 0
        self._cache: dict[str, TokenIds] = {}
        self._cached_characters = 0
        self._arguments = {**special_tokens, **(template_arguments or {})}
        self._template = None
        if chat_template is not None:
            try:
                self._template = _environment().from_string(chat_template)
            except TemplateError as error:
                raise ValueError(
                    f"the chat template of {name} cannot be parsed ({one_line(error)})"
                ) from error

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text, [length], without tokens of the template's own."""
        if self._cut is None:
            return self._piece(text)
        ids = self._join(text, self._cut)
        if self._num_checked < _CHECKED_TEXTS and len(text) > 1000:
            self._num_checked += 1
            whole = self._whole(text)
            if not np.array_equal(ids, whole):  # pieces depend on their neighbours
                self._cut = None
                self._cache.clear()
                return whole
        return ids

    def decode(self, ids: NDArray[np.integer] | Sequence[int]) -> str:
        """Return the text of token ids, control tokens included."""
        return str(self.backend.decode(list(map(int, ids)), skip_special_tokens=False))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        generate: bool = False,
    ) -> str:
        """Return the text of a conversation.

        Args:
            generate: end with what opens a reply.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                f"the tokenizer {self.name} has no chat template; pass --tokenizer "
                "with one of a chat model"
            )
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=generate,
                **self._arguments,
            )
        except (TemplateError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"the chat template of {self.name} refuses the messages "
                f"({one_line(error)})"
            ) from error

    def _join(self, text: str, cut: re.Pattern[str]) -> TokenIds:
        parts = []
        for i, piece in enumerate(cut.split(text)):
            if i % 2:
                parts.append(np.array([self._added[piece]], np.int32))
            elif piece:
                parts.append(self._piece(piece))
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _piece(self, text: str) -> TokenIds:
        ids = self._cache.get(text)
        if ids is None:
            ids = self._whole(text)
            self._cached_characters += len(text)
            if self._cached_characters > _MAX_CACHED_CHARACTERS:
                self._cache.clear()
                self._cached_characters = len(text)
            self._cache[text] = ids
        return ids

    def _whole(self, text: str) -> TokenIds:
        encoded = self.backend.encode(text, add_special_tokens=False)
        return np.array(encoded.ids, np.int32)


def load_tokenizer(
    name: str = DEFAULT_TOKENIZER, template_arguments: Mapping[str, Any] | None = None
) -> TextTokenizer:
    """Load the tokenizer of a folder or a hub name; ``qwen3`` needs neither.

    Raises:
        ValueError: it cannot be loaded; says what to pass.
    """
    if name == DEFAULT_TOKENIZER:
        from recipes.tau2.recorded.qwen_tokenizer import (
            CHAT_TEMPLATE_FILE,
            build_backend,
        )

        qwen = CHAT_TEMPLATE_FILE.read_text(encoding="utf-8")
        special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        return TextTokenizer(build_backend(), name, qwen, special, template_arguments)
    try:
        files = _files(name)
        backend = Tokenizer.from_file(str(files["tokenizer.json"]))
        config = {}
        if "tokenizer_config.json" in files:
            config = json.loads(files["tokenizer_config.json"].read_text("utf-8"))
    except Exception as error:  # of the hub, of the file system, of the tokenizers
        raise ValueError(
            f"no tokenizer at {name!r} ({one_line(error)}); expected a folder with "
            f"tokenizer.json, a hub name, or {DEFAULT_TOKENIZER}"
        ) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template}
        template = named.get("default") or next(iter(named.values()), None)
    if "chat_template.jinja" in files:
        template = files["chat_template.jinja"].read_text("utf-8")
    special = {
        key: value if isinstance(value, str) else str(value.get("content", ""))
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    backend.no_truncation()
    backend.no_padding()
    return TextTokenizer(backend, name, template, special, template_arguments)


_FILES = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def _files(name: str) -> dict[str, Path]:
    folder = Path(name)
    if folder.is_dir():
        found = {file: folder / file for file in _FILES if (folder / file).is_file()}
        if "tokenizer.json" not in found:
            raise ValueError("the folder has no tokenizer.json")
        return found
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    found = {"tokenizer.json": Path(hf_hub_download(name, "tokenizer.json"))}
    for file in _FILES[1:]:
        try:
            found[file] = Path(hf_hub_download(name, file))
        except (EntryNotFoundError, LocalEntryNotFoundError):
            continue
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
