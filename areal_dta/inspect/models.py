"""Sizes of models: by name, from a config.json, or written out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from areal_dta.config.composed import one_line
from areal_dta.inspect.corpus import InputError
from areal_dta.schedule import FlopModel, MemoryModel
from areal_dta.schedule.decoder_sizes import DecoderSizes

FIELDS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_SHORT: Final = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    # Small ones, which scripts/bench_executor.py builds. At the lengths of tau2, `20m`
    # spends about the same share of its FLOPs on the vocabulary as Qwen3-0.6B (18 % and
    # 17 % at 6,000 tokens), which is what outputs at loss positions only save.
    "tiny": (512, 64, 128, 2, 4, 2, 16),
    "2m": (8192, 128, 384, 2, 2, 1, 64),
    "20m": (32768, 256, 768, 16, 4, 2, 64),
    "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": (151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": (151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128),
    "qwen3-14b": (151936, 5120, 17408, 40, 40, 8, 128),
    "qwen3-32b": (151936, 5120, 25600, 64, 64, 8, 128),
    "qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2, 64),
    "qwen2.5-1.5b": (151936, 1536, 8960, 28, 12, 2, 128),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, 128),
    "llama-3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64),
    "llama-3.1-8b": (128256, 4096, 14336, 32, 32, 8, 128),
}
DEFAULT_MODEL: Final = "qwen3-1.7b"
DTYPES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
# Logits that are held, and whose softmax is taken at once, by kind of device: those of
# the executor's head, which is not imported here.
_LOGITS: Final = {"cpu": (2**25, 2**19), "gpu": (2**27, 2**25)}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model as far as its costs depend on it."""

    name: str
    sizes: DecoderSizes
    vocab_size: int
    flops: FlopModel
    memory: MemoryModel
    element_bytes: int
    device: str
    """``cpu`` or ``gpu``."""


def model_sizes(name: str, dtype: str, device: str) -> ModelSizes:
    """Return the sizes of a model.

    Args:
        name: a shape of this module, a folder or file with a config, a hub name, or
            sizes such as ``hidden=1024,layers=28,heads=16,intermediate=3072,
            vocab=151936``.

    Raises:
        InputError: none of them, or a size is missing.
    """
    config = _config(name)
    try:
        return ModelSizes(
            name=name,
            sizes=DecoderSizes.from_config(config),
            vocab_size=int(config.vocab_size),
            flops=FlopModel.from_config(config),
            memory=MemoryModel.from_config(config, DTYPES[dtype], *_LOGITS[device]),
            element_bytes=DTYPES[dtype],
            device=device,
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"--model {name}: {one_line(error)}; sizes can be written out, e.g. "
            "hidden=1024,layers=28,heads=16,kv_heads=8,intermediate=3072,vocab=151936"
        ) from error


def _config(name: str) -> Any:
    if (shape := SHAPES.get(name.lower().rsplit("/", 1)[-1])) is not None:
        kind = "qwen3" if "llama" not in name and "2.5" not in name else "llama"
        return SimpleNamespace(model_type=kind, **dict(zip(FIELDS, shape, strict=True)))
    if "=" in name:
        return _written_out(name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file() and path.suffix != ".json":
        try:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        except Exception as error:  # of the hub, of the network
            raise InputError(
                f"--model {name}: no such file, and not on the hub "
                f"({one_line(error)[:120]}); expected one of {', '.join(SHAPES)}, a "
                "folder with config.json, or sizes (hidden=...,layers=...)"
            ) from error
    try:
        values = json.loads(path.read_text("utf-8"))
        values = {**values, **values.get("text_config", {})}
        return SimpleNamespace(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"--model {path}: not a model's config ({one_line(error)})"
        ) from error


def _written_out(text: str) -> SimpleNamespace:
    values: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = _SHORT.get(key.strip(), key.strip())
        if key not in FIELDS or not value.strip().isdigit() or not int(value):
            raise InputError(
                f"--model {text}: {part!r}; expected NAME=NUMBER with a name of "
                f"{', '.join([*_SHORT, 'head_dim'])}"
            )
        values[key] = int(value)
    return SimpleNamespace(model_type="llama", **values)
