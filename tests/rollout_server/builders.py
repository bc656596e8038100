"""Tasks, an oracle, and servers for the tests of the local rollout backend."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from transformers import PreTrainedModel

from areal_dta.config.server_options import LocalServerConfig
from areal_dta.rollout_server.answers import Answer, GenerationTask
from areal_dta.rollout_server.generation import BatchGenerator
from areal_dta.rollout_server.sampling import RowSampling
from areal_dta.rollout_server.server import build_command, open_socket
from tests.models import VOCAB_SIZE, tiny_model

_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Types whose layers carry a state from token to token.
WITH_STATES = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {
        **_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    },
}

START_TIMEOUT_SECONDS = 120.0
EXIT_TIMEOUT_SECONDS = 20.0
CONTEXT_LENGTH = 2048
TOLERANCE = 1e-5
"""Largest difference of a logprob in float32."""


def model_for_generation(name: str = "qwen3", **overrides: Any) -> PreTrainedModel:
    overrides = {"max_position_embeddings": CONTEXT_LENGTH, **overrides}
    return tiny_model(name, **overrides).eval().requires_grad_(False)


def make_generator(model: PreTrainedModel, **limits: Any) -> BatchGenerator:
    limits = {
        "max_batch_size": 64,
        "max_cached_tokens": 10**6,
        "max_prefill_tokens": 10**6,
        **limits,
    }
    return BatchGenerator(model, **limits)


def make_task(prompt: list[int], max_new_tokens: int, **options: Any) -> GenerationTask:
    sampling = RowSampling(
        options.pop("temperature", 1.0),
        options.pop("top_p", 1.0),
        options.pop("top_k", -1),
    )
    defaults: dict[str, Any] = {
        "min_new_tokens": 0,
        "stop_token_ids": frozenset(),
        "stop_strings": (),
        "seed": "0",
    }
    return GenerationTask(
        prompt=tuple(prompt),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        **{**defaults, **options},
    )


def run_all(generator: BatchGenerator, tasks: list[GenerationTask]) -> list[Answer]:
    answers = [Answer(task) for task in tasks]
    generator.admit(answers)
    while generator.rows:
        generator.step()
    return answers


@torch.no_grad()
def oracle_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float
) -> list[float]:
    """Logprobs of `tokens` behind `prompt` by one forward over the whole sequence."""
    sequence = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=sequence, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    positions = torch.arange(len(prompt) - 1, sequence.shape[1] - 1)
    return logprobs[positions, torch.tensor(tokens, dtype=torch.long)].tolist()


def max_difference(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right)
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


def check_logprobs(model: PreTrainedModel, answers: Iterable[Any]) -> None:
    """Compare the logprobs of answers, or of a client's calls, with the oracle's."""
    for answer in answers:
        expected = oracle_logprobs(
            model,
            list(answer.task.prompt),
            answer.tokens,
            answer.task.sampling.temperature or 1.0,
        )
        assert max_difference(answer.logprobs, expected) < TOLERANCE


@dataclass
class RunningServer:
    port: int
    process: subprocess.Popen

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, endpoint: str, body: Any = None, **kwargs: Any) -> requests.Response:
        return requests.post(
            self.url + endpoint, json={} if body is None else body, timeout=60, **kwargs
        )

    def generate(self, prompt: list[int], **params: Any) -> requests.Response:
        return self.post(
            "/generate",
            {"input_ids": prompt, "sampling_params": params, "return_logprob": True},
        )

    def info(self) -> dict[str, Any]:
        return requests.get(self.url + "/get_server_info", timeout=60).json()


def free_port() -> int:
    sock = open_socket("127.0.0.1", 0)
    try:
        return sock.getsockname()[1]
    finally:
        sock.close()


def wait_until(condition: Any, what: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_seconds} s"
        time.sleep(0.02)


def is_healthy(port: int) -> bool:
    try:
        url = f"http://127.0.0.1:{port}/health"
        return requests.get(url, timeout=10).status_code == 200
    except requests.RequestException:
        return False


def is_gone(pid: int) -> bool:
    """Ended; an orphan may stay a zombie where nobody reaps."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def running_server(model_path: Path, **options: Any) -> Iterator[RunningServer]:
    port = free_port()
    config = LocalServerConfig(model_path=str(model_path), port=port, **options)
    process = subprocess.Popen(build_command(config, os.getpid()))
    try:
        wait_until(
            lambda: is_healthy(port) or process.poll() is not None,
            "server start",
            START_TIMEOUT_SECONDS,
        )
        assert process.poll() is None, f"server ended with {process.returncode}"
        yield RunningServer(port, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(EXIT_TIMEOUT_SECONDS)
            raise


__all__ = ["VOCAB_SIZE"]
