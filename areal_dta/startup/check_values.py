"""Check single values of a configuration, by rules that hold for every section.

AReaL's configuration classes list the choices of many options, but nothing compares
them: a wrong word is an error of a worker, minutes later. Bounds are by the last part
of a key, as the same options recur in several sections.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

from areal_dta.config.composed import ConfigError, did_you_mean
from areal_dta.config.redaction import redacted_keys

_MIN_ONE: Final = 1
_MIN_ZERO: Final = 0
_MINIMUM: Final = {
    **dict.fromkeys(
        (
            "batch_size",
            "consumer_batch_size",
            "granularity",
            "group_size",
            "max_concurrent_rollouts",
            "max_new_tokens",
            "max_tokens_per_mb",
            "n_mbs",
            "n_mbs_divisor",
            "n_nodes",
            "n_samples",
            "ppo_n_minibatches",
            "queue_size",
            "total_train_epochs",
        ),
        _MIN_ONE,
    ),
    **dict.fromkeys(
        (
            "cpu",
            "eps",
            "eps_clip",
            "gpu",
            "kl_ctl",
            "lr",
            "max_head_offpolicyness",
            "mem",
            "min_new_tokens",
            "num_workers",
            "port_count",
            "request_retries",
            "temperature",
            "top_p",
            "weight_decay",
        ),
        _MIN_ZERO,
    ),
}
_POSITIVE: Final = ("gradient_clipping", "request_timeout", "setup_timeout")
_SHARES: Final = ("beta1", "beta2", "top_p", "warmup_steps_proportion")
_MAX_INTEGER: Final = 2**63 - 1


def check_values(config: Any) -> None:
    """Check every value of nested dataclasses.

    Raises:
        ConfigError: names the key, what was got and what was expected.
    """
    for name, field, value in _values(config):
        choices = field.metadata.get("choices")
        if choices and isinstance(value, str) and value not in choices:
            words = [str(choice) for choice in choices]
            raise ConfigError(
                f"{name}={value}: unknown{did_you_mean(value, words)}; expected one of "
                f"{', '.join(words)}"
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(name, value)
    if hidden := redacted_keys(dataclasses.asdict(config)):
        raise ConfigError(
            f"{hidden[0]} is hidden in this file, which a run has saved; set it again, "
            f"e.g. {hidden[0]}='${{oc.env:NAME}}' for the environment variable NAME"
        )


def _check_number(name: str, value: float) -> None:
    key = name.rpartition(".")[2]
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{name}=nan; expected a number")
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise ConfigError(f"{name}={value}; expected at most {_MAX_INTEGER}")
    if key in _POSITIVE and value <= 0:
        raise ConfigError(f"{name}={value}; expected a number above 0")
    if key in _MINIMUM and value < _MINIMUM[key]:
        raise ConfigError(f"{name}={value}; expected {_MINIMUM[key]} or more")
    if key in _SHARES and not 0 <= value <= 1:
        raise ConfigError(f"{name}={value}; expected 0 to 1")


def _values(
    owner: Any, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Return the full name, field and value of every leaf."""
    for field in dataclasses.fields(owner):
        value, name = getattr(owner, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{name}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from _values(item, f"{name}.{i}.")
        else:
            yield name, field, value
