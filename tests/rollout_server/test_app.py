"""What the application answers when generation itself goes wrong."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from areal_dta.rollout_server import http_rules
from areal_dta.rollout_server import server as server_module
from areal_dta.rollout_server.app import RolloutApp
from areal_dta.rollout_server.generation import BatchGenerator
from areal_dta.rollout_server.generation_thread import GenerationThread
from areal_dta.rollout_server.http_rules import Guard
from areal_dta.rollout_server.server import EXIT_GENERATION_DIED, open_socket, serve
from tests.rollout_server.builders import make_generator

BODY = {"input_ids": [3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
TIMEOUT = 60.0
URL = "http://localhost"


@pytest.fixture
def generator(model) -> BatchGenerator:
    return make_generator(model)


def make_app(model, generator: BatchGenerator, max_queued: int = 2, **options):
    thread = GenerationThread(generator, max_queued)
    app = RolloutApp(
        model=model,
        model_path="test",
        generator=generator,
        thread=thread,
        context_length=64,
        random_seed=1,
        **options,
    )
    thread.start()
    return app.build(), thread


def run_client(
    app, thread, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            await asyncio.wait_for(scenario(client), TIMEOUT)

    try:
        asyncio.run(main())
    finally:
        thread.stop(TIMEOUT)


def test_a_failed_step_is_a_500_and_the_server_goes_on(
    model, generator, monkeypatch
) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        def broken():
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(generator, "step", broken)
            reply = await client.post("/generate", json=BODY)
            assert reply.status_code == 500
            assert "out of memory" in reply.json()["error"]["message"]
        reply = await client.get("/health")
        assert reply.status_code == 200
        reply = await client.post("/generate", json=BODY)
        assert len(reply.json()["output_ids"]) == 2

    run_client(*make_app(model, generator), scenario)


def test_a_full_queue_is_a_503(model, generator) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        async def send() -> int:
            reply = await client.post("/generate", json=BODY)
            return reply.status_code

        await client.post("/pause_generation", json={})
        first = [asyncio.create_task(send()) for _ in range(2)]
        while True:
            reply = await client.get("/get_server_info")
            if reply.json()["num_waiting"] == 2:
                break
        assert await send() == 503
        await client.post("/continue_generation", json={})
        assert await asyncio.gather(*first) == [200, 200]

    run_client(*make_app(model, generator, max_queued=2), scenario)


def test_a_body_over_the_limit_is_a_413(model, generator, monkeypatch) -> None:
    monkeypatch.setattr(http_rules, "MAX_BODY_BYTES", 1000)

    async def chunks():
        for _ in range(20):
            yield b" " * 100

    async def scenario(client: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "application/json"}
        for content in (b" " * 2000, chunks()):  # with its length and without
            reply = await client.post("/generate", content=content, headers=headers)
            assert reply.status_code == 413
            assert "1000 bytes" in reply.json()["error"]["message"]
        assert (await client.post("/generate", json=BODY)).status_code == 200

    run_client(*make_app(model, generator), scenario)


def test_a_bug_is_a_500_and_the_server_goes_on(model, generator, monkeypatch) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(RolloutApp, "_render", lambda *args: 1 / 0)
            reply = await client.post("/generate", json=BODY)
            assert reply.status_code == 500
            assert "ZeroDivisionError" in reply.json()["error"]["message"]
        assert (await client.post("/generate", json=BODY)).status_code == 200

    run_client(*make_app(model, generator), scenario)


def kill_thread(generator: BatchGenerator, monkeypatch) -> None:
    def die(waiting):
        raise SystemError("cosmic ray")

    monkeypatch.setattr(generator, "drop", die)


def test_a_dead_generation_thread_shows_in_health(
    model, generator, monkeypatch
) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        reply = await client.get("/health")
        assert reply.status_code == 200
        kill_thread(generator, monkeypatch)
        for _ in range(2):
            reply = await client.post("/generate", json=BODY)
            assert reply.status_code == 503
            assert "cosmic ray" in reply.json()["error"]["message"]
        reply = await client.get("/health")
        assert reply.status_code == 503

    run_client(*make_app(model, generator), scenario)


def test_a_dead_generation_thread_ends_the_server(
    model, generator, monkeypatch
) -> None:
    """So that whoever watches the process or its port notices."""
    monkeypatch.setattr(server_module, "_DEAD_LINGER_SECONDS", 0.1)
    kill_thread(generator, monkeypatch)
    app, thread = make_app(model, generator)

    async def main() -> int:
        sock = open_socket("127.0.0.1", 0)
        sock.listen()  # the server may start a moment later
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/generate"
        ending = asyncio.create_task(serve(app, thread, sock))
        async with asyncio.timeout(TIMEOUT), httpx.AsyncClient() as client:
            assert (await client.post(url, json=BODY)).status_code == 503
            return await ending

    assert asyncio.run(main()) == EXIT_GENERATION_DIED


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("93.184.216.34", 421),
        ("127.0.0.1:9", 200),
        ("localhost", 200),
        ("[::1]:9", 200),
    ],
)
def test_names_of_others_are_refused(model, generator, host: str, status: int) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        headers = {"Host": host}
        assert (await client.get("/health", headers=headers)).status_code == status
        reply = await client.post("/generate", json=BODY, headers=headers)
        assert reply.status_code == status

    run_client(*make_app(model, generator), scenario)


def test_a_token_is_asked_for(model, generator) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        async def status(body, **headers: str) -> int:
            reply = await client.post("/generate", json=body, headers=headers)
            assert "s3cret" not in reply.text
            return reply.status_code

        assert await status(BODY) == 401
        assert await status({**BODY, "token": "s3cre"}) == 401
        assert await status({**BODY, "token": 5}) == 401
        assert await status([BODY]) == 401
        assert await status(BODY, authorization="Bearer other") == 401
        assert await status({**BODY, "token": "s3cret"}) == 200
        assert await status(BODY, authorization="Bearer s3cret") == 200
        assert (await client.post("/pause_generation", json={})).status_code == 401
        assert (await client.get("/health")).status_code == 200

    guard = Guard(token="s3cret")
    run_client(*make_app(model, generator, guard=guard), scenario)


def test_draws_follow_from_seed_prompt_and_sample(model) -> None:
    """Whichever server answers, in whatever order."""

    def answers(prompts, **params):
        replies = []

        async def scenario(client: httpx.AsyncClient) -> None:
            sampling = {"max_new_tokens": 12, "ignore_eos": True, **params}
            for prompt in prompts:
                body = {"input_ids": prompt, "sampling_params": sampling}
                reply = await client.post("/generate", json=body)
                replies.append((tuple(prompt), tuple(reply.json()["output_ids"])))

        run_client(*make_app(model, make_generator(model)), scenario)
        return replies

    first = answers([[3], [3], [5]])
    assert len({tokens for _, tokens in first}) == 3
    assert sorted(answers([[5], [3], [3]])) == sorted(first)
    keyed = answers([[3], [3]], draw_key="prompt/1/0/0")
    assert keyed[0] == keyed[1] != first[0]
    assert answers([[3]], draw_key="prompt/1/0/1") != keyed[:1]
