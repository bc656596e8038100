"""Checkpoints: loading of model, tokenizer and new weights.

Only safetensors files are read; nothing is ever unpickled and no code from a checkpoint
is run. A new checkpoint is read completely, compared with the running model, and
copied only when everything fits, so a refused one leaves the model as it was.
"""

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from areal_dta.config import lora
from areal_dta.executor.checks.multimodal import serving_class
from areal_dta.executor.model_refusals import (
    UnsupportedModelError,
    check_model_supported,
)
from areal_dta.rollout_server.states import state_layers

#: Layers whose cache is plain keys and values, or a state that `states` keeps.
_SUPPORTED_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "conv"}
)
#: Configuration entries that change results without changing a weight's shape.
_FUNCTION_KEYS = (
    "model_type",
    "hidden_act",
    "layer_types",
    "num_attention_heads",
    "num_experts_per_tok",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)
_MAX_NAMES = 4


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded into this server."""


def pick_device(device: str) -> torch.device:
    """Resolve cpu, cuda or auto to a device of this machine.

    Raises:
        ValueError: `device` is cuda, and PyTorch sees no GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no GPU; use device=cpu.")
    return torch.device(device)


def load_model(
    model_path: str, device: torch.device, dtype: str, attn_impl: str
) -> PreTrainedModel:
    """Load a causal language model for generation.

    Raises:
        CheckpointError: there is no such checkpoint, or its model cannot be served.
    """
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        model: PreTrainedModel = serving_class(config).from_pretrained(
            model_path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attn_impl,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise CheckpointError(f"cannot load {model_path!r}: {error}") from error
    check_supported(model)
    move(model, device)
    return model.eval().requires_grad_(False)


def load_tokenizer(model_path: str) -> Any:
    """Load a checkpoint's tokenizer, which only stop strings need.

    Raises:
        CheckpointError: the checkpoint has no tokenizer.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"stop strings need a tokenizer, and {model_path} has none that can be "
            f"loaded ({error}); use stop_token_ids."
        ) from error
    # Without tokenizer files, Transformers may return one of special tokens alone.
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise CheckpointError(
            f"stop strings need a tokenizer, and {model_path} has none; use "
            "stop_token_ids."
        )
    return tokenizer


def move(model: PreTrainedModel, device: torch.device) -> None:
    """Move the model, in place."""
    torch.nn.Module.to(model, device)


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of token ids, including rows that only pad the embedding."""
    return int(model.config.get_text_config().vocab_size)


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-sequence tokens that the model's two configurations name."""
    found: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


def context_length(model: PreTrainedModel) -> int | None:
    """Return the length that the model was made for; None if not configured."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def update_weights(model: PreTrainedModel, model_path: str) -> None:
    """Replace the weights in place by those of a checkpoint of the same model.

    Transformers reads the files, so checkpoints that store weights under other names
    or in other pieces than the model does (experts of MoE models) work as well.

    Memory: one more copy of the weights in main memory during the update.

    Raises:
        CheckpointError: the checkpoint does not fit, and the model is untouched; the
            message says what does not fit.
    """
    path = Path(model_path)
    if not path.is_dir():
        raise CheckpointError(f"{model_path!r} is not a directory on this machine.")
    if problem := lora.adapter_problem(path):
        raise CheckpointError(problem)
    targets = model.state_dict()
    try:
        _check_same_function(model, path)
        state = _read_same_names(model, path, targets)
        if state is None:
            state = _read_converted(model, path)
    except CheckpointError:
        raise
    except Exception as error:  # truncated or foreign files raise what they like
        raise CheckpointError(f"cannot read {model_path!r}: {error}") from error
    _check_finite(model_path, state)
    _check_aliases(model_path, state, targets)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(state[name])


def _read_same_names(
    model: PreTrainedModel, path: Path, targets: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Read one file that holds the model's tensors under the model's names.

    This is what a trainer saves of a small model, and several times faster than
    Transformers, which builds a second model first.

    Returns:
        None if it is anything else: Transformers then converts it, or says what is
        missing.
    """
    file = path / "model.safetensors"
    if not file.is_file() or get_model_conversion_mapping(model, add_legacy=False):
        return None
    stored = load_file(file)
    # Tied weights are stored once, under either name.
    by_address = {
        target.data_ptr(): stored[name]
        for name, target in targets.items()
        if name in stored
    }
    state = {
        name: stored.get(name, by_address.get(target.data_ptr()))
        for name, target in targets.items()
    }
    if not stored.keys() <= state.keys():
        return None
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if tensor is None or tensor.shape != targets[name].shape:
            return None
        found[name] = tensor.to(targets[name].dtype)
    return found


def _read_converted(model: PreTrainedModel, path: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint as Transformers does, with its conversions.

    Raises:
        CheckpointError: something is missing, or does not belong to the model.
    """
    new, info = type(model).from_pretrained(
        path,
        config=copy.deepcopy(model.config),
        dtype=model.dtype,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # listed below, with everything else
        output_loading_info=True,
    )
    _check_complete(str(path), info)
    return dict(new.state_dict())


def _check_complete(model_path: str, info: Mapping[str, Any]) -> None:
    problems = [
        f"{what}: {_shorten(sorted(str(name) for name in names))}"
        for what, names in (
            ("missing", info["missing_keys"]),
            ("unknown to the model", info["unexpected_keys"]),
            ("of another shape (name, checkpoint, model)", info["mismatched_keys"]),
            ("unreadable", info["error_msgs"]),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{model_path!r} is not a checkpoint of the model that is being served. "
            f"Weights {'; '.join(problems)}."
        )


def _check_finite(model_path: str, state: Mapping[str, torch.Tensor]) -> None:
    bad = [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]
    if bad:
        raise CheckpointError(
            f"{model_path!r} holds NaN or infinite weights in {_shorten(bad)}; the "
            "training has probably diverged."
        )


def _check_aliases(
    model_path: str,
    state: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
) -> None:
    """Refuse different weights for names that are one tensor in the model (tied)."""
    first_name: dict[int, str] = {}
    for name, target in targets.items():
        first = first_name.setdefault(target.data_ptr(), name)
        if target.numel() and not torch.equal(state[first], state[name]):
            raise CheckpointError(
                f"{model_path!r} holds different weights for {first} and {name}, which "
                "are tied in the model that is being served; save the checkpoint with "
                "tied weights, or serve a model with tie_word_embeddings=false."
            )


def _check_same_function(model: PreTrainedModel, path: Path) -> None:
    """Refuse a checkpoint whose configuration would change what the model computes."""
    if not (path / "config.json").exists():
        return
    new = AutoConfig.from_pretrained(
        path, trust_remote_code=False, local_files_only=True
    )
    served = model.config.get_text_config()
    for key in _FUNCTION_KEYS:
        got, expected = (
            getattr(config, key, None) for config in (new.get_text_config(), served)
        )
        if got != expected:
            raise CheckpointError(
                f"{str(path)!r} has {key}={got!r:.200}, the model that is being served "
                f"{expected!r:.200}; restart the server for another model."
            )


def check_supported(model: PreTrainedModel) -> None:
    """Check that a model can be served; its weights are not needed.

    Raises:
        CheckpointError: it cannot.
    """
    # The trainer refuses models in which a token's values depend on more than its
    # path. Here those values would depend on the other requests of the batch.
    try:
        check_model_supported(model, training=False)
        state_layers(model)
    except UnsupportedModelError as error:
        raise CheckpointError(
            f"{error} (a server that batches requests has the same limits)"
        ) from error
    name = type(model).__name__
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    if other := layer_types - _SUPPORTED_LAYER_TYPES:
        raise CheckpointError(
            f"{name} has layers of type {_shorten(sorted(other))}, whose state cannot "
            "be moved between batches; use rollout.backend=sglang."
        )
    accepted = set(inspect.signature(model.forward).parameters)
    needed = {"position_ids", "attention_mask", "past_key_values", "logits_to_keep"}
    if missing := needed - accepted:
        raise CheckpointError(
            f"{name} cannot be served: its forward takes no "
            f"{_shorten(sorted(missing))}; use rollout.backend=sglang."
        )


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
