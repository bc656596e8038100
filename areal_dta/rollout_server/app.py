"""HTTP application of the local rollout server.

Handlers check what comes in, hand it to the generation thread and wait for a future.
A refused request is a 400 whose reason line repeats the message, because AReaL's
client logs the reason of a failed request but not its body.
"""

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from aiohttp import web
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedModel

from areal_dta.rollout_server import weights
from areal_dta.rollout_server.generation import (
    Answer,
    BatchGenerator,
    GenerationError,
    GenerationTask,
)
from areal_dta.rollout_server.generation_thread import (
    GenerationWorker,
    QueueFullError,
    WorkerDeadError,
)
from areal_dta.rollout_server.protocol import (
    EmptyRequest,
    GenerateRequest,
    MemoryRequest,
    PauseRequest,
    UpdateWeightsRequest,
    describe_validation_error,
)
from areal_dta.rollout_server.sampling import RowSampling

logger = logging.getLogger(__name__)
RequestT = TypeVar("RequestT", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 * 1024 * 1024
#: A pause waits for one decode step, a weight update for the disk.
CONTROL_TIMEOUT_SECONDS = 600.0
#: SGLang takes smaller temperatures for greedy decoding, too.
_GREEDY_BELOW = 1e-6
_MAX_REASON_CHARS = 300

#: Endpoints AReaL's client knows and this server does not serve, with the remedy.
UNSUPPORTED_ENDPOINTS = {
    "/init_weights_update_group": "set actor.weight_update_mode=disk",
    "/update_weights_from_distributed": "set actor.weight_update_mode=disk",
    "/update_weights_from_tensor": "set actor.weight_update_mode=disk",
    "/load_lora_adapter": "set actor.use_lora=false",
    "/unload_lora_adapter": "set actor.use_lora=false",
}


class RolloutApp:
    """The endpoints over one model and its generation thread."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        model_path: str,
        generator: BatchGenerator,
        worker: GenerationWorker,
        context_length: int | None,
        random_seed: int,
    ) -> None:
        self._model = model
        self._model_path = model_path
        self._generator = generator
        self._worker = worker
        self._context_length = context_length
        self._random_seed = random_seed
        self._vocab_size = weights.vocab_size(model)
        self._eos_token_ids = weights.eos_token_ids(model)
        self._device = model.device
        self._request_counter = itertools.count()
        self._released: set[str] = set()
        self._weight_version = "0"
        self._num_updates = 0

    def build(self) -> web.Application:
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[_errors_to_json]
        )
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/get_model_info", self.get_model_info),
                web.get("/get_server_info", self.get_server_info),
                web.post("/generate", self.generate),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/update_weights_from_disk", self.update_weights),
                web.post("/release_memory_occupation", self.release_memory),
                web.post("/resume_memory_occupation", self.resume_memory),
                *(web.post(path, _unsupported) for path in UNSUPPORTED_ENDPOINTS),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        if not self._worker.is_alive:
            return _error(503, "the generation thread has ended; restart the server.")
        return web.json_response({"status": "ok"})

    async def get_model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "weight_version": self._weight_version,
            }
        )

    async def get_server_info(self, request: web.Request) -> web.Response:
        stats = self._worker.stats()
        return web.json_response(
            {
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "holds": list(stats.holds),
                "num_weight_updates": self._num_updates,
                "context_length": self._context_length,
                "device": str(self._device),
                "pid": os.getpid(),
            }
        )

    async def generate(self, request: web.Request) -> web.Response:
        body = await _parse(request, GenerateRequest)
        task = self.resolve(body, next(self._request_counter))
        answer = await asyncio.wrap_future(self._worker.submit(task))
        return web.json_response(self._render(body, answer))

    async def pause(self, request: web.Request) -> web.Response:
        await _parse(request, PauseRequest)
        await _control(self._worker.pause())
        return web.json_response({"status": "ok", "message": "Generation is paused."})

    async def resume(self, request: web.Request) -> web.Response:
        await _parse(request, EmptyRequest)
        await _control(self._worker.resume())
        return web.json_response({"status": "ok", "message": "Generation continues."})

    async def update_weights(self, request: web.Request) -> web.Response:
        body = await _parse(request, UpdateWeightsRequest)

        def update() -> None:
            weights.update_weights(self._model, body.model_path)
            self._num_updates += 1
            self._weight_version = body.weight_version or str(self._num_updates)

        await _control(self._worker.run_exclusively(update))
        return web.json_response(
            {"success": True, "message": f"Loaded the weights of {body.model_path}."}
        )

    async def release_memory(self, request: web.Request) -> web.Response:
        """Free the KV cache, and the GPU memory of the weights (kept on the CPU)."""
        tags = (await _parse(request, MemoryRequest)).tags
        released = {"weights", "kv_cache"} & set(tags or ("weights", "kv_cache"))

        def release() -> None:
            self._released |= released
            if "weights" in released and self._device.type == "cuda":
                weights.move(self._model, torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        await _control(self._worker.release_memory(release))
        return web.json_response({"status": "ok"})

    async def resume_memory(self, request: web.Request) -> web.Response:
        tags = (await _parse(request, MemoryRequest)).tags

        def resume() -> bool:
            self._released -= set(tags or ("weights", "kv_cache"))
            if "weights" not in self._released:
                weights.move(self._model, self._device)
            return not self._released

        await _control(self._worker.resume_memory(resume))
        return web.json_response({"status": "ok"})

    def resolve(self, body: GenerateRequest, index: int) -> GenerationTask:
        """Check a request against the model.

        Raises:
            ValueError: the request cannot be served; the message says why.
        """
        params, prompt = body.sampling_params, tuple(body.input_ids)
        if not (0 <= min(prompt) and max(prompt) < self._vocab_size):
            bad = next(t for t in prompt if not 0 <= t < self._vocab_size)
            raise ValueError(
                f"input_ids: token {bad} at position {prompt.index(bad)} is not in the "
                f"vocabulary of the model, [0, {self._vocab_size})."
            )
        if params.min_new_tokens > params.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={params.min_new_tokens} is more than "
                f"max_new_tokens={params.max_new_tokens}."
            )
        total = len(prompt) + params.max_new_tokens
        if self._context_length is not None and total > self._context_length:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_new_tokens="
                f"{params.max_new_tokens} = {total} is more than the context of "
                f"{self._context_length} tokens; lower gconfig.max_new_tokens (or "
                "max_tokens) or filter long prompts."
            )
        if body.logprob_start_len > len(prompt):
            raise ValueError(
                f"logprob_start_len={body.logprob_start_len} is behind the prompt of "
                f"{len(prompt)} tokens."
            )
        if params.stop_strings:
            self._generator.decoder()
        # As in SGLang, ignore_eos switches off stop_token_ids as well (AReaL's
        # workflows always add EOS to those). Ids beyond the vocabulary never come up.
        stop_ids = self._eos_token_ids | set(params.stop_token_ids or ())
        if params.ignore_eos:
            stop_ids = frozenset()
        seed = params.sampling_seed
        return GenerationTask(
            prompt=prompt,
            sampling=RowSampling(
                params.temperature if params.temperature >= _GREEDY_BELOW else 0.0,
                params.top_p,
                params.top_k,
            ),
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            stop_token_ids=frozenset(t for t in stop_ids if 0 <= t < self._vocab_size),
            stop_strings=params.stop_strings,
            seed=f"{self._random_seed}/{index}" if seed is None else f"request/{seed}",
            prompt_logprobs_from=(
                body.logprob_start_len
                if body.return_logprob and body.logprob_start_len >= 0
                else None
            ),
        )

    def _render(self, body: GenerateRequest, answer: Answer) -> dict[str, Any]:
        assert answer.finish is not None
        task, meta = answer.task, dict[str, Any]()
        meta["id"] = body.rid
        meta["finish_reason"] = answer.finish.to_json()
        meta["prompt_tokens"] = len(task.prompt)
        meta["completion_tokens"] = len(answer.tokens)
        meta["weight_version"] = self._weight_version
        if body.return_logprob:
            meta["output_token_logprobs"] = _triples(answer.logprobs, answer.tokens)
        if answer.prompt_logprobs is not None:
            # SGLang starts with an entry without a logprob; AReaL's client cannot read
            # that one, and drops it where it can.
            first = len(task.prompt) - len(answer.prompt_logprobs)
            meta["input_token_logprobs"] = _triples(
                answer.prompt_logprobs, task.prompt[first:]
            )
        return {"output_ids": answer.tokens, "meta_info": meta}


def _triples(logprobs: Any, tokens: Any) -> list[list[Any]]:
    """SGLang's [logprob, token id, token text]; the text is never filled in here."""
    return [[lp, t, None] for lp, t in zip(logprobs, tokens, strict=True)]


async def _control(future: Future[T]) -> T:
    try:
        return await asyncio.wait_for(
            asyncio.wrap_future(future), CONTROL_TIMEOUT_SECONDS
        )
    except TimeoutError:
        raise GenerationError(
            "the generation thread did not get to it within "
            f"{CONTROL_TIMEOUT_SECONDS:.0f} s."
        ) from None


async def _parse(request: web.Request, kind: type[RequestT]) -> RequestT:
    # Also keeps web pages in a browser on this machine from posting here unasked.
    if request.content_type != "application/json":
        raise ValueError(
            f"content type {request.content_type!r}; expected application/json."
        )
    return kind.model_validate_json(await request.read() or b"{}")


async def _unsupported(request: web.Request) -> web.Response:
    return _error(
        501,
        f"the local rollout server does not support {request.path}; "
        f"{UNSUPPORTED_ENDPOINTS[request.path]} or use rollout.backend=sglang.",
    )


@web.middleware
async def _errors_to_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        return _error(400, describe_validation_error(error))
    except ValueError as error:
        return _error(400, str(error))
    except (QueueFullError, WorkerDeadError) as error:
        return _error(503, str(error))
    except GenerationError as error:
        return _error(500, str(error))
    except web.HTTPException:
        raise
    except Exception as error:  # a bug here must not take the server down
        logger.exception("%s failed.", request.path)
        return _error(500, f"internal error: {error!r}")


def _error(status: int, message: str) -> web.Response:
    logger.info("Answered with status %d: %s", status, message)
    line = " ".join(message.split()).encode("ascii", "replace").decode()
    return web.Response(
        status=status,
        reason=line[:_MAX_REASON_CHARS],
        text=json.dumps({"error": {"message": message, "code": status}}),
        content_type="application/json",
    )
