"""Options of tau2 rollouts: the section `tau2` of a YAML, as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipes.tau2.domains import find_domain

USER_KINDS = ("rule", "llm", "gold")


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class UserOptions:
    """The simulated user; solo domains have none."""

    kind: str = _option(
        "rule",
        "llm: a model at base_url. rule: states its case and agrees; needs no model. "
        "gold: carries out its part of the reference solution.",
    )
    max_replies: int = _option(3, "rule: messages before it ends the episode.")
    base_url: str = _option("", "llm: OpenAI-compatible URL, ending in /v1.")
    model: str = _option("default", "llm: name of the model.")
    api_key: str = _option("none", "llm: key for the URL.")
    temperature: float = _option(0.0, "llm: of the sampling.")
    max_tokens: int = _option(512, "llm: of one message.")
    timeout_seconds: float = _option(120.0, "llm: of one request.")
    max_retries: int = _option(3, "llm: of one request, with growing pauses.")


@dataclass
class Tau2Options:
    """A domain, its user, and the limits of an episode."""

    domain: str = _option(
        "telecom_solo", "airline, retail, telecom, telecom_solo or mock."
    )
    user: UserOptions = field(default_factory=UserOptions)
    max_steps: int = _option(
        100, "Messages and tool results of an episode; 50 cuts most telecom episodes."
    )
    max_errors: int = _option(10, "Failed tool calls of an episode.")
    request_timeout_seconds: float = _option(600.0, "Of one call of the agent's model.")
    episode_timeout_seconds: float = _option(3600.0, "Of one episode.")
    environment_processes: int = _option(
        2, "Processes of a rollout worker that hold large databases (airline, retail)."
    )
    reward_processes: int = _option(2, "Evaluating processes of a rollout worker.")
    reward_timeout_seconds: float = _option(60.0, "Of one evaluation.")

    def validate(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option is wrong; the message says which and what to do.
        """
        find_domain(self.domain)
        user = self.user
        numbers = {n: v for n, v in vars(self).items() if isinstance(v, int | float)}
        for name in ("max_replies", "max_tokens", "timeout_seconds"):
            numbers[f"user.{name}"] = getattr(user, name)
        for name, value in numbers.items():
            if value <= 0:
                raise ValueError(f"tau2.{name}={value}; expected a positive number")
        if user.max_retries < 0:
            raise ValueError(f"tau2.user.max_retries={user.max_retries}; expected >= 0")
        if user.kind not in USER_KINDS:
            raise ValueError(
                f"tau2.user.kind={user.kind!r}; expected one of {', '.join(USER_KINDS)}"
            )
        if find_domain(self.domain).solo:
            return
        if user.kind == "gold":
            raise ValueError(
                "tau2.user.kind=gold follows a script that only the gold policy knows; "
                "use llm or rule with a model"
            )
        if user.kind == "llm" and not user.base_url:
            raise ValueError(
                "tau2.user.kind=llm needs tau2.user.base_url, an OpenAI-compatible "
                "server, e.g. http://127.0.0.1:8000/v1; or use tau2.user.kind=rule"
            )
