"""The part of SGLang's HTTP protocol that the local server speaks, as Pydantic models.

What the protocol has but this server does not do is part of the models with its neutral
value, so that a client which sends it is served and one which asks for it is refused
by name. Everything else that is unknown is refused too: a mistyped option must not
silently change what is sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

#: SGLang's default where the request does not say.
DEFAULT_MAX_NEW_TOKENS = 128
_MAX_PROBLEMS = 8
# Stop strings are looked for after every token.
_MAX_STOPS = 1024
_MAX_STOP_CHARS = 1024
_MAX_KEY_CHARS = 256


class Request(BaseModel):
    """Body of a request without options, and the base of the others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: Shared secret of the run, already checked; AReaL's client cannot send headers.
    token: str | None = Field(default=None, repr=False)


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


def _check_top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError(f"expected -1 (all tokens) or at least 1, got {value}")
    return value


def _list_stops(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


class SamplingParams(Request):
    """How one answer is sampled. `temperature` 0 is greedy decoding."""

    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, AfterValidator(_check_top_k)] = -1
    max_new_tokens: int = Field(default=DEFAULT_MAX_NEW_TOKENS, ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[int] | None = Field(default=None, max_length=_MAX_STOPS)
    #: An empty string would stop every answer.
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]],
        BeforeValidator(_list_stops),
        Field(max_length=_MAX_STOPS),
    ] = []
    ignore_eos: bool = False
    sampling_seed: int | None = None
    #: Ours: names the random stream of the answer, see areal_backend.py.
    draw_key: str | None = Field(default=None, min_length=1, max_length=_MAX_KEY_CHARS)
    #: Ours: tokens of the answer that were drawn before an interruption.
    num_drawn: int = Field(default=0, ge=0)
    #: Only text would show it, and this server returns token ids.
    skip_special_tokens: bool = True

    frequency_penalty: Annotated[float, _unsupported(0.0)] = 0.0
    presence_penalty: Annotated[float, _unsupported(0.0)] = 0.0
    repetition_penalty: Annotated[float, _unsupported(1.0)] = 1.0
    min_p: Annotated[float, _unsupported(0.0)] = 0.0
    n: Annotated[int, _unsupported(1)] = 1

    @model_validator(mode="after")
    def _check_lengths(self) -> "SamplingParams":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than "
                f"max_new_tokens={self.max_new_tokens}"
            )
        return self


class GenerateRequest(Request):
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


class UpdateWeightsRequest(Request):
    """Body of POST /update_weights_from_disk."""

    model_path: str = Field(min_length=1)
    #: Answers never mix two sets of weights, so what runs has to be aborted first.
    abort_all_requests: Annotated[bool, _unsupported(True)] = True
    weight_version: str | None = None


class PauseRequest(Request):
    """Body of POST /pause_generation."""

    mode: Annotated[Literal["abort"], _unsupported("abort")] = "abort"


class MemoryRequest(Request):
    """Body of POST /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why an answer ended; `detail` is the matched token or string, or a message."""

    type: Literal["stop", "length", "abort"]
    detail: int | str

    def to_json(self) -> dict[str, Any]:
        key = {"stop": "matched", "length": "length", "abort": "message"}[self.type]
        return {"type": self.type, key: self.detail}


def describe_errors(errors: Sequence[Any]) -> str:
    """Describe Pydantic's errors: where each is, what is wrong, and what was got."""
    problems = []
    for error in errors[:_MAX_PROBLEMS]:
        if error["type"] == "json_invalid":
            problems.append(f"body: invalid JSON: {error['ctx']['error']}")
            continue
        where = ".".join(str(part) for part in error["loc"] if part != "body")
        problem = f"{where or 'body'}: {error['msg'].removeprefix('Value error, ')}"
        # Our own messages say it themselves, and whole objects would be too long.
        got = error["input"]
        if error["type"] != "value_error" and not isinstance(got, dict | list):
            problem += f" (got {got!r:.60})"
        problems.append(problem)
    return "; ".join(problems)
