"""Puts a server together: model, generation thread, HTTP application."""

from typing import Any

import torch
from aiohttp import web
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from areal_dta.rollout_server import weights
from areal_dta.rollout_server.app import RolloutApp
from areal_dta.rollout_server.config import LocalServerConfig
from areal_dta.rollout_server.generation import BatchGenerator, Decoder
from areal_dta.rollout_server.generation_thread import GenerationWorker


def load_decoder(model_path: str) -> Decoder:
    """The tokenizer of a checkpoint.

    Raises:
        ValueError: it has none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"stop strings need a tokenizer, and {model_path} has none that can be "
            f"loaded ({error}); use stop_token_ids."
        ) from error
    # Where the files are missing, Transformers may make one up of special tokens.
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"stop strings need a tokenizer, and {model_path} has none; use "
            "stop_token_ids."
        )
    decoder: Decoder = tokenizer
    return decoder


def build_app(config: LocalServerConfig) -> tuple[web.Application, GenerationWorker]:
    """Load the model and start its generation thread.

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
    generator = BatchGenerator(
        model,
        max_batch_size=config.max_batch_size,
        max_cached_tokens=config.max_cached_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        load_decoder=lambda: load_decoder(config.model_path),
    )
    worker = GenerationWorker(generator, config.max_queued_requests)
    app = RolloutApp(
        model=model,
        model_path=config.model_path,
        generator=generator,
        worker=worker,
        context_length=limit,
        random_seed=config.random_seed,
    ).build()
    worker.start()
    return app, worker
