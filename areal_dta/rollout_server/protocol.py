"""The part of SGLang's HTTP protocol that the local server speaks, as pydantic models.

What the protocol has but this server does not do is part of the models with its neutral
value, so that a client which sends it is served and one which asks for it is refused
by name. Everything else that is unknown is refused too: a mistyped option must not
silently change what is sampled.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

#: SGLang's default where the request does not say.
DEFAULT_MAX_NEW_TOKENS = 128


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _unsupported(*neutral: Any) -> BeforeValidator:
    """Accept only the values that mean "do not use this feature"."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise ValueError(
                f"the local rollout server does not support this (got {value!r}, "
                f"expected {neutral[0]!r}); leave it out or use rollout.backend=sglang"
            )
        return value

    return BeforeValidator(check)


class SamplingParams(_Strict):
    """How one answer is sampled. `temperature` 0 is greedy decoding."""

    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = -1
    max_new_tokens: int = Field(default=DEFAULT_MAX_NEW_TOKENS, ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    # Only text would show it, and this server returns token ids.
    skip_special_tokens: bool = True

    frequency_penalty: Annotated[float, _unsupported(0.0)] = 0.0
    presence_penalty: Annotated[float, _unsupported(0.0)] = 0.0
    repetition_penalty: Annotated[float, _unsupported(1.0)] = 1.0
    min_p: Annotated[float, _unsupported(0.0)] = 0.0
    n: Annotated[int, _unsupported(1)] = 1

    @field_validator("top_k")
    @classmethod
    def _check_top_k(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError(f"expected -1 (all tokens) or at least 1, got {value}")
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and "" in ([value] if isinstance(value, str) else value):
            raise ValueError("an empty stop string would stop every answer")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class GenerateRequest(_Strict):
    """Body of POST /generate."""

    input_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    #: From this position on, the prompt's own logprobs are returned too; -1 for none.
    logprob_start_len: int = Field(default=-1, ge=-1)
    rid: str | None = None

    stream: Annotated[bool, _unsupported(False)] = False
    top_logprobs_num: Annotated[int, _unsupported(0)] = 0
    image_data: Annotated[list[Any] | None, _unsupported(None, [])] = None
    return_routed_experts: Annotated[bool, _unsupported(False)] = False
    lora_path: Annotated[str | None, _unsupported(None)] = None


class UpdateWeightsRequest(_Strict):
    """Body of POST /update_weights_from_disk."""

    model_path: str = Field(min_length=1)
    #: Answers never mix two sets of weights, so what runs has to be aborted first.
    abort_all_requests: Annotated[bool, _unsupported(True)] = True
    weight_version: str | None = None


class PauseRequest(_Strict):
    """Body of POST /pause_generation."""

    mode: Annotated[Literal["abort"], _unsupported("abort")] = "abort"


class MemoryRequest(_Strict):
    """Body of POST /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class EmptyRequest(_Strict):
    """Body of the endpoints without options."""


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why an answer ended; `detail` is the matched token or string, or a message."""

    type: Literal["stop", "length", "abort"]
    detail: int | str

    def to_json(self) -> dict[str, Any]:
        key = {"stop": "matched", "length": "length", "abort": "message"}[self.type]
        return {"type": self.type, key: self.detail}


def describe_validation_error(error: ValidationError) -> str:
    """One line a problem: where it is, what is wrong with it."""
    problems = []
    for item in error.errors(include_url=False, include_input=False)[:8]:
        where = ".".join(str(part) for part in item["loc"]) or "body"
        problems.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(problems)
