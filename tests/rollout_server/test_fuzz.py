"""Any request is answered: served if it is good, refused by name if it is not."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal_dta.rollout_server.app import RolloutApp
from areal_dta.rollout_server.generation_thread import GenerationThread
from tests.rollout_server.builders import VOCAB_SIZE, make_generator

CONTEXT = 48
TIMEOUT = 60.0
ENDPOINTS = ("/generate", "/pause_generation", "/continue_generation")

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, VOCAB_SIZE), max_size=3),
    st.just({}),
)
good_params = {
    "temperature": st.floats(0.0, 1e300),
    "top_p": st.floats(0.0, 1.0, exclude_min=True),
    "top_k": st.integers(1, 2**40) | st.just(-1),
    "max_new_tokens": st.integers(1, 6),
    "min_new_tokens": st.integers(0, 8),
    "stop_token_ids": st.none() | st.lists(st.integers(-5, 2**40), max_size=3),
    "ignore_eos": st.booleans(),
    "sampling_seed": st.none() | st.integers(),
    "draw_key": st.none() | st.text(min_size=1, max_size=8),
    "num_drawn": st.integers(0, 5),
    "frequency_penalty": st.just(0.0),
}
good_body = {
    "return_logprob": st.booleans(),
    "logprob_start_len": st.integers(-1, 6),
    "rid": st.none() | st.text(max_size=5),
    "token": st.none() | st.text(max_size=5),
    "stream": st.just(False),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, bool]:
    """A body, and whether something odd was put into it."""
    params = draw(st.fixed_dictionaries({}, optional=good_params))
    body = draw(st.fixed_dictionaries({}, optional=good_body))
    body |= {
        "input_ids": draw(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)
        ),
        "sampling_params": params,
    }
    if is_odd := draw(st.booleans()):
        target = draw(st.sampled_from([params, body]))
        names = [*good_params, *good_body, "input_ids", "stop", "n", "unheard_of"]
        target[draw(st.sampled_from(names))] = draw(odd)
    return body, is_odd


def is_good(body: Any) -> bool:
    """What the documentation promises, written again without Pydantic."""

    def is_int(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
        return type(value) is int and low <= value <= high

    prompt, params = body["input_ids"], body["sampling_params"]
    new = params.get("max_new_tokens", 128)
    if not (
        isinstance(prompt, list)
        and prompt
        and all(is_int(token, 0, VOCAB_SIZE - 1) for token in prompt)
        and is_int(new, 1, CONTEXT - len(prompt))
    ):
        return False
    temperature, top_p = params.get("temperature", 1.0), params.get("top_p", 1.0)
    return (
        isinstance(temperature, int | float)
        and 0 <= temperature < math.inf
        and isinstance(top_p, int | float)
        and 0 < top_p <= 1
        and is_int(params.get("min_new_tokens", 0), 0, new)
    )


@pytest.fixture(scope="module")
def client(model) -> Iterator[Any]:
    generator = make_generator(model, max_cached_tokens=4096)
    thread = GenerationThread(generator, 64)
    app = RolloutApp(model, "test", generator, thread, CONTEXT, random_seed=1).build()
    thread.start()

    async def post(endpoint: str, content: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost"
        ) as client:
            sending = client.post(
                endpoint, content=content, headers={"Content-Type": "application/json"}
            )
            return await asyncio.wait_for(sending, TIMEOUT)

    with asyncio.Runner() as runner:
        yield lambda endpoint, content: runner.run(post(endpoint, content))
    thread.stop(TIMEOUT)


def check_request(client: Any, case: tuple[Any, bool]) -> None:
    body, is_odd = case
    reply = client("/generate", json.dumps(body).encode())
    if reply.status_code != 200:
        assert reply.status_code in (400, 500), reply.text
        message = reply.json()["error"]["message"]
        assert message and "internal error" not in message
        # 500: nothing could be drawn, e.g. all tokens are banned until min_new_tokens.
        assert reply.status_code == 400 or "no token could be drawn" in message
        return
    assert is_good(body)
    tokens = reply.json()["output_ids"]
    assert 1 <= len(tokens) <= body["sampling_params"].get("max_new_tokens", 128)
    assert all(0 <= token < VOCAB_SIZE for token in tokens)


def check_bytes(client: Any, endpoint: str, content: bytes) -> None:
    reply = client(endpoint, content)
    try:
        is_empty = json.loads(content) == {}
    except (ValueError, RecursionError):
        is_empty = False
    if endpoint == "/generate" or not is_empty:
        assert reply.status_code == 400, reply.text


quick = settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
many = settings(quick, max_examples=10_000)


@quick
@example(({"input_ids": [1], "sampling_params": {"temperature": 1e-300}}, False))
@example(({"input_ids": [1], "sampling_params": {"temperature": math.nan}}, True))
@example(({"input_ids": [1], "sampling_params": {"sampling_seed": 2**70}}, False))
@example(({"input_ids": [2**70], "sampling_params": {}}, True))
@example(({"input_ids": [1], "sampling_params": {"num_drawn": 2**70}}, True))
@example(({"input_ids": [1], "sampling_params": {"draw_key": "\ud800"}}, True))
@given(case=requests())
def test_requests(client, case) -> None:
    check_request(client, case)


@quick
@example(endpoint="/generate", content=b"[" * 100_000)
@example(endpoint="/generate", content=b'{"input_ids": [1' + b"0" * 5000 + b"]}")
@given(endpoint=st.sampled_from(ENDPOINTS[:1]), content=st.binary(max_size=60))
def test_bytes(client, endpoint: str, content: bytes) -> None:
    check_bytes(client, endpoint, content)


@pytest.mark.slow
@many
@given(case=requests())
def test_many_requests(client, case) -> None:
    check_request(client, case)
