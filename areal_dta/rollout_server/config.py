"""Options of the embedded rollout server, as a structured config and as a command line.

Only the standard library is imported here: the launcher reads this long before torch
is needed.
"""

import argparse
import ipaddress
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")

EXIT_BAD_CONFIG = 2
#: The port was taken between choosing and binding it; the launcher tries another.
EXIT_PORT_IN_USE = 3
EXIT_GENERATION_DIED = 4

#: `host: auto` stands for this machine's own address, as AReaL determines it.
AUTO_HOST = "auto"


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address) can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class LocalServerConfig:
    """Options of one embedded rollout server (`rollout.backend=local:dN` starts N)."""

    model_path: str = _option("", "Hugging Face checkpoint: a directory or a hub name.")
    host: str = _option(
        "127.0.0.1",
        "Address to listen on. The protocol has no authentication, so anything but "
        "loopback also needs allow_remote. 'auto' is this machine's own address, for "
        "runs over several machines.",
    )
    port: int = _option(0, "Port to listen on; 0 lets the launcher find a free one.")
    allow_remote: bool = _option(
        False,
        "Accept an address that other machines can reach. Whoever reaches it can "
        "generate, and can load weights from this machine's disk.",
    )
    device: str = _option("auto", "cpu, cuda, or auto (cuda where there is one).")
    dtype: str = _option(
        "float32", "Weights and KV cache; auto follows the checkpoint."
    )
    attn_impl: str = _option("sdpa", "Transformers attention implementation.")
    context_length: int | None = _option(
        None, "Most tokens of prompt and answer; None follows the model."
    )
    max_batch_size: int = _option(128, "Most requests that are generated together.")
    max_cached_tokens: int = _option(
        262_144, "Most KV positions, padding included, that are held at a time."
    )
    max_prefill_tokens: int = _option(
        16_384, "Most prompt tokens, padding included, per prefill forward."
    )
    max_queued_requests: int = _option(
        4096, "Requests that may wait; more are refused."
    )
    random_seed: int = _option(1, "Seed of the sampling.")
    num_threads: int = _option(1, "CPU threads of the model (OMP_NUM_THREADS).")
    log_level: str = _option("warning", "debug, info, warning or error.")

    def validate(self) -> None:
        """Check every option that can be checked without touching the model.

        Raises:
            ValueError: an option is wrong; the message says which and what to do.
        """
        if not self.model_path:
            raise ValueError("model_path is empty; name a Hugging Face checkpoint.")
        for name, choices in (
            ("dtype", DTYPES),
            ("device", DEVICES),
            ("log_level", LOG_LEVELS),
        ):
            if (got := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{name}={got!r}; expected one of {', '.join(choices)}."
                )
        for name in (
            "max_batch_size",
            "max_cached_tokens",
            "max_prefill_tokens",
            "max_queued_requests",
            "num_threads",
        ):
            if (got := getattr(self, name)) < 1:
                raise ValueError(f"{name}={got}; expected at least 1.")
        if self.context_length is not None and self.context_length < 2:
            raise ValueError(
                f"context_length={self.context_length}; expected 2 or more."
            )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}; expected 0 to 65535.")
        if not self.allow_remote and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, and the "
                "rollout protocol has no authentication; use host=127.0.0.1, or set "
                "allow_remote=true on a network that you trust."
            )

    def build_args(self) -> dict[str, Any]:
        """The `server_args` dictionary that AReaL hands to `launch_server`."""
        return asdict(self)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "LocalServerConfig":
        """Inverse of `build_args`.

        Raises:
            ValueError: a key is not an option of this server.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(args) - known):
            raise ValueError(
                f"unknown option(s) of the local rollout server: {', '.join(unknown)}; "
                f"expected some of {', '.join(sorted(known))}."
            )
        return cls(**args)


def build_command(config: LocalServerConfig, parent_pid: int | None) -> list[str]:
    """Command line that serves `config`; the server ends when `parent_pid` does."""
    command = [sys.executable, "-m", "areal_dta.rollout_server.server"]
    for name, value in asdict(config).items():
        if value is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    if parent_pid is not None:
        command.append(f"--parent-pid={parent_pid}")
    return command


def _parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def parse_command(argv: Sequence[str]) -> tuple[LocalServerConfig, int | None]:
    """Inverse of `build_command`, without its first three words."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_dta.rollout_server.server",
        description="Embedded rollout server for AReaL, after SGLang's protocol.",
        allow_abbrev=False,
    )
    for f in fields(LocalServerConfig):
        kind: Any = f.type
        if isinstance(kind, types.UnionType):  # int | None
            kind = typing.get_args(kind)[0]
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            type=_parse_bool if kind is bool else kind,
            default=f.default,
            help=f"{f.metadata['help']} [{f.default}]",
        )
    parser.add_argument(
        "--parent-pid", type=int, help="End when this process is no longer the parent."
    )
    values = vars(parser.parse_args(argv))
    parent_pid = values.pop("parent_pid")
    return LocalServerConfig(**values), parent_pid
