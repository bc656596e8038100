"""HTTP endpoints of the local rollout server.

FastAPI routes and validates. Handlers check what only the model can tell, hand the
request to the generation thread and wait for a future. `http_rules.py` holds what is
the same for all of them.
"""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, HTTPException, Request, Response
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_dta.config.server_options import LocalServerConfig
from areal_dta.rollout_server import protocol, weights
from areal_dta.rollout_server.answers import Answer, GenerationError, GenerationTask
from areal_dta.rollout_server.generation import BatchGenerator
from areal_dta.rollout_server.generation_thread import (
    GenerationThread,
    QueueFullError,
    ThreadDeadError,
)
from areal_dta.rollout_server.http_rules import Guard, create_app
from areal_dta.rollout_server.sampling import RowSampling

T = TypeVar("T")

#: A pause waits for one decode step, a weight update for the disk.
CONTROL_TIMEOUT_SECONDS = 600.0
#: SGLang takes smaller temperatures for greedy decoding, too.
_GREEDY_BELOW = 1e-6
#: Prompts that are remembered until the next weight update, to tell their draws apart.
_MAX_OCCURRENCES = 65_536
_MEMORY_TAGS = ("weights", "kv_cache")

#: Endpoints AReaL's client knows and this server does not serve, with the remedy.
UNSUPPORTED_ENDPOINTS = {
    "/init_weights_update_group": "set actor.weight_update_mode=disk",
    "/update_weights_from_distributed": "set actor.weight_update_mode=disk",
    "/update_weights_from_tensor": "set actor.weight_update_mode=disk",
    "/load_lora_adapter": "set actor.use_lora=false",
    "/unload_lora_adapter": "set actor.use_lora=false",
}


@dataclass(eq=False)
class RolloutApp:
    """The endpoints over one model and its generation thread."""

    model: PreTrainedModel
    model_path: str
    generator: BatchGenerator
    thread: GenerationThread
    context_length: int | None
    random_seed: int
    guard: Guard = Guard()

    def __post_init__(self) -> None:
        self._vocab_size = weights.vocab_size(self.model)
        self._eos_token_ids = weights.eos_token_ids(self.model)
        self._device = self.model.device
        # Requests without a draw key: how often each prompt came.
        self._occurrences: Counter[str] = Counter()
        self._released: set[str] = set()
        self._weight_version = "0"
        self._num_updates = 0
        # Of all answers so far.
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    def build(self) -> FastAPI:
        app = create_app(
            self.guard,
            {
                # What only the model can tell of a request, and damaged checkpoints.
                ValueError: 400,
                QueueFullError: 503,
                ThreadDeadError: 503,
                GenerationError: 500,
            },
        )
        for path, get in (
            ("/health", self.health),
            ("/get_model_info", self.get_model_info),
            ("/get_server_info", self.get_server_info),
        ):
            app.get(path)(get)
        posts: tuple[tuple[str, Any], ...] = (
            ("/generate", self.generate),
            ("/pause_generation", self.pause),
            ("/continue_generation", self.resume),
            ("/update_weights_from_disk", self.update_weights),
            ("/flush_cache", self.flush_cache),
            ("/release_memory_occupation", self.release_memory),
            ("/resume_memory_occupation", self.resume_memory),
            *((path, _unsupported) for path in UNSUPPORTED_ENDPOINTS),
        )
        for path, post in posts:
            app.post(path)(post)
        return app

    async def health(self) -> dict[str, Any]:
        if not self.thread.is_alive:
            raise ThreadDeadError(
                "the generation thread has ended; restart the server."
            )
        return {"status": "ok"}

    async def get_model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "tokenizer_path": self.model_path,
            "is_generation": True,
            "weight_version": self._weight_version,
        }

    async def get_server_info(self) -> dict[str, Any]:
        stats = self.thread.stats()
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "holds": list(stats.holds),
            "num_weight_updates": self._num_updates,
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_cached_tokens": self._num_cached_tokens,
            "num_kv_bytes": self.generator.num_kv_bytes,
            "context_length": self.context_length,
            "device": str(self._device),
            "pid": os.getpid(),
        }

    async def generate(self, body: protocol.GenerateRequest) -> Response:
        task = self._resolve(body)
        answer = await asyncio.wrap_future(self.thread.submit(task))
        # Neither FastAPI's encoder, which is slow on long answers, nor Starlette's,
        # which refuses the NaN that a diverged model may report for a prompt.
        content = json.dumps(self._render(body, answer))
        return Response(content, media_type="application/json")

    async def pause(self, body: protocol.PauseRequest) -> dict[str, Any]:
        await _control(self.thread.pause())
        return {"status": "ok", "message": "Generation is paused."}

    async def resume(self, body: protocol.Request) -> dict[str, Any]:
        await _control(self.thread.resume())
        return {"status": "ok", "message": "Generation continues."}

    async def update_weights(
        self, body: protocol.UpdateWeightsRequest
    ) -> dict[str, Any]:
        def update() -> None:
            weights.update_weights(self.model, body.model_path)
            self._num_updates += 1
            self._occurrences.clear()
            self._weight_version = body.weight_version or str(self._num_updates)

        await _control(self.thread.run_exclusively(update))
        return {"success": True, "message": f"Loaded the weights of {body.model_path}."}

    async def flush_cache(self, body: protocol.Request) -> dict[str, Any]:
        """Abort what runs, and forget all cached prefixes."""
        await _control(self.thread.run_exclusively(lambda: None))
        return {"status": "ok", "message": "The prefix cache is empty."}

    async def release_memory(self, body: protocol.MemoryRequest) -> dict[str, Any]:
        """Free the KV cache, and the GPU memory of the weights (kept on the CPU)."""
        released = set(_MEMORY_TAGS) & set(body.tags or _MEMORY_TAGS)

        def release() -> None:
            self._released |= released
            if "weights" in released and self._device.type == "cuda":
                weights.move(self.model, torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        await _control(self.thread.release_memory(release))
        return {"status": "ok"}

    async def resume_memory(self, body: protocol.MemoryRequest) -> dict[str, Any]:
        def resume() -> bool:
            self._released -= set(body.tags or _MEMORY_TAGS)
            if "weights" not in self._released:
                weights.move(self.model, self._device)
            return not self._released

        await _control(self.thread.resume_memory(resume))
        return {"status": "ok"}

    def _resolve(self, body: protocol.GenerateRequest) -> GenerationTask:
        """Check a request against the model.

        Raises:
            ValueError: the request cannot be served; the message says why.
        """
        params, prompt = body.sampling_params, tuple(body.input_ids)
        # What only the model can tell; the rest has been checked by Pydantic.
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"input_ids: token {token} at position {prompt.index(token)} is "
                    f"not in the vocabulary of the model, [0, {self._vocab_size})."
                )
        if params.num_drawn > len(prompt):
            raise ValueError(
                f"num_drawn={params.num_drawn} is more than the prompt's {len(prompt)} "
                "tokens, of which those drawn are a part."
            )
        total = len(prompt) + params.max_new_tokens
        if self.context_length is not None and total > self.context_length:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_new_tokens="
                f"{params.max_new_tokens} = {total} is more than the context of "
                f"{self.context_length} tokens; lower gconfig.max_new_tokens (or "
                "max_tokens) or filter long prompts."
            )
        if body.logprob_start_len > len(prompt):
            raise ValueError(
                f"logprob_start_len={body.logprob_start_len} is behind the prompt of "
                f"{len(prompt)} tokens."
            )
        if params.stop:
            self.generator.decoder()  # raises if there is no tokenizer

        # As in SGLang, ignore_eos switches off stop_token_ids as well (AReaL's
        # workflows always add EOS to those). Ids beyond the vocabulary never come up.
        stop_ids = self._eos_token_ids | set(params.stop_token_ids or ())
        if params.ignore_eos:
            stop_ids = frozenset()
        wants_prompt = body.return_logprob and body.logprob_start_len >= 0
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
            stop_strings=tuple(params.stop),
            seed=self._seed(params, prompt),
            num_drawn=params.num_drawn,
            prompt_logprobs_from=body.logprob_start_len if wants_prompt else None,
        )

    def _seed(self, params: protocol.SamplingParams, prompt: tuple[int, ...]) -> str:
        if params.sampling_seed is not None:
            return f"request/{params.sampling_seed}"
        if params.draw_key is not None:
            return f"{self.random_seed}/{params.draw_key}"
        if len(self._occurrences) >= _MAX_OCCURRENCES:
            self._occurrences.pop(next(iter(self._occurrences)))
        digest = hashlib.blake2b(str(prompt).encode(), digest_size=16).hexdigest()
        self._occurrences[digest] += 1
        occurrence = self._occurrences[digest]
        return f"{self.random_seed}/own/{self._num_updates}/{digest}/{occurrence}"

    def _render(self, body: protocol.GenerateRequest, answer: Answer) -> dict[str, Any]:
        assert answer.finish is not None
        prompt = answer.task.prompt
        self._num_prompt_tokens += len(prompt)
        self._num_cached_tokens += answer.num_cached_tokens
        meta: dict[str, Any] = {
            "id": body.rid,
            "finish_reason": answer.finish.to_json(),
            "prompt_tokens": len(prompt),
            "cached_tokens": answer.num_cached_tokens,
            "completion_tokens": len(answer.tokens),
            "weight_version": self._weight_version,
        }
        if body.return_logprob:
            meta["output_token_logprobs"] = _triples(answer.logprobs, answer.tokens)
        if answer.prompt_logprobs is not None:
            # SGLang starts with an entry without a logprob; AReaL's client cannot read
            # that one, and drops it where it can.
            scored = prompt[len(prompt) - len(answer.prompt_logprobs) :]
            meta["input_token_logprobs"] = _triples(answer.prompt_logprobs, scored)
        return {"output_ids": answer.tokens, "meta_info": meta}


def build_app(
    config: LocalServerConfig, token: str | None = None
) -> tuple[FastAPI, GenerationThread]:
    """Load the model and start its generation thread.

    Args:
        token: secret that every POST must hold; None asks for none.

    Raises:
        ValueError: the model cannot be served; the message says why.
    """
    torch.set_num_threads(config.num_threads)
    transformers_logging.disable_progress_bar()
    model = weights.load_model(
        config.model_path,
        weights.pick_device(config.device),
        config.dtype,
        config.attn_impl,
    )
    limit = weights.context_length(model)
    if config.context_length is not None:
        if limit is not None and config.context_length > limit:
            raise ValueError(
                f"context_length={config.context_length} is more than the {limit} "
                f"tokens that {config.model_path} was made for."
            )
        limit = config.context_length
    # Where nothing else bounds a request, it has to fit into the cache.
    limit = config.max_cached_tokens if limit is None else limit
    generator = BatchGenerator(
        model,
        max_batch_size=config.max_batch_size,
        max_cached_tokens=config.max_cached_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        prefix_cache_bytes=config.prefix_cache_bytes,
        load_decoder=lambda: weights.load_tokenizer(config.model_path),
    )
    thread = GenerationThread(generator, config.queue_limit())
    app = RolloutApp(
        model=model,
        model_path=config.model_path,
        generator=generator,
        thread=thread,
        context_length=limit,
        random_seed=config.random_seed,
        guard=Guard(config.host, token),
    ).build()
    thread.start()
    return app, thread


def _triples(logprobs: Sequence[float], tokens: Sequence[int]) -> list[list[Any]]:
    """Return SGLang's [logprob, token id, token text]; the text is never filled in."""
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


async def _unsupported(request: Request) -> None:
    path = request.url.path
    raise HTTPException(
        501,
        f"the local rollout server does not support {path}; "
        f"{UNSUPPORTED_ENDPOINTS[path]} or use rollout.backend=sglang.",
    )
