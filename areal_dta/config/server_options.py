"""Options of the embedded rollout server: section `local` of a configuration.

Only the standard library is imported here, because the launcher reads this module long
before torch is needed.
"""

import ipaddress
from dataclasses import dataclass

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "log_level": ("debug", "info", "warning", "error"),
}
_AT_LEAST_ONE = (
    "max_batch_size",
    "max_cached_tokens",
    "max_prefill_tokens",
    "num_threads",
)
#: Environment variable with the secret that servers and clients of a run share. It is
#: in no option, because those are saved and are part of a server's command line.
TOKEN_VARIABLE = "AREAL_DTA_ROLLOUT_TOKEN"
_DEFAULT_QUEUE = 4096
#: Open files of a server besides its connections.
SPARE_FILES = 256
_MIN_CONTEXT = 2  # one token of prompt and one of answer


@dataclass
class LocalServerConfig:
    """Options of one embedded rollout server (`rollout.backend=local:dN` starts N)."""

    # For Pydantic, which reads these options from a server's command line.
    __pydantic_config__ = {"extra": "forbid"}

    #: Hugging Face checkpoint: a directory or a hub name.
    model_path: str = ""
    #: Address to listen on; anything but loopback also needs `allow_remote`. `auto`
    #: is this machine's own address, for runs over several machines.
    host: str = "127.0.0.1"
    #: Port to listen on; 0 lets the rollout worker find a free one.
    port: int = 0
    #: Accept an address that other machines can reach. Whoever reaches it and reads
    #: the run's token, which is sent in clear text, can generate, and can load
    #: weights from this machine's disk.
    allow_remote: bool = False
    #: cpu, cuda, or auto (cuda where there is one).
    device: str = "auto"
    #: Data type of the weights and the KV cache; auto follows the checkpoint.
    dtype: str = "float32"
    #: Attention implementation of Transformers.
    attn_impl: str = "sdpa"
    #: Maximum number of tokens of prompt and answer; None follows the model.
    context_length: int | None = None
    #: Maximum number of requests that are generated together. With 1, answers are equal
    #: from run to run to the last bit, and no prefix is kept.
    max_batch_size: int = 128
    #: Maximum number of KV positions of running requests, padding included.
    max_cached_tokens: int = 262_144
    #: Bytes for K/V of former prompts and answers, which later prompts may start with;
    #: least recently used ones go first, and all at a weight update. 0: none are kept.
    prefix_cache_bytes: int = 512 * 1024**2
    #: Maximum number of prompt tokens per forward: longer prompts are prefilled in
    #: pieces, between which the other requests go on.
    max_prefill_tokens: int = 512
    #: Maximum number of requests that wait; more are refused. None: what the run can
    #: have in flight, and at least 4,096.
    max_queued_requests: int | None = None
    #: Seed of the sampling.
    random_seed: int = 1
    #: CPU threads of the model (OMP_NUM_THREADS).
    num_threads: int = 1
    #: debug, info, warning or error.
    log_level: str = "warning"

    def validate(self) -> None:
        """Check every option that can be checked without touching the model.

        Raises:
            ValueError: an option is wrong; the message says which and what to do.
        """
        if not self.model_path:
            raise ValueError("model_path is empty; name a Hugging Face checkpoint.")
        for name, choices in _CHOICES.items():
            if (got := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{name}={got!r}; expected one of {', '.join(choices)}."
                )
        for name in _AT_LEAST_ONE:
            if (got := getattr(self, name)) < 1:
                raise ValueError(f"{name}={got}; expected at least 1.")
        if self.prefix_cache_bytes < 0:
            raise ValueError(
                f"prefix_cache_bytes={self.prefix_cache_bytes}; expected 0 or more."
            )
        if self.max_queued_requests is not None and self.max_queued_requests < 1:
            raise ValueError(
                f"max_queued_requests={self.max_queued_requests}; expected at least 1."
            )
        if self.context_length is not None and self.context_length < _MIN_CONTEXT:
            raise ValueError(
                f"context_length={self.context_length}; expected {_MIN_CONTEXT} or "
                "more."
            )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}; expected 0 to 65535.")
        if not self.allow_remote and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, and the "
                "rollout protocol is not encrypted; use host=127.0.0.1, or set "
                "allow_remote=true on a network that you trust."
            )

    def queue_limit(self, num_in_flight: int = 0) -> int:
        """Return `max_queued_requests`, or what so many requests at once need."""
        return self.max_queued_requests or max(_DEFAULT_QUEUE, num_in_flight)


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, is this machine's alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
