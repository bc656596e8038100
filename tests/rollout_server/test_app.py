"""What the application answers when generation itself goes wrong."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from areal_dta.rollout_server import server as server_module
from areal_dta.rollout_server.app import RolloutApp
from areal_dta.rollout_server.config import EXIT_GENERATION_DIED
from areal_dta.rollout_server.generation import BatchGenerator
from areal_dta.rollout_server.generation_thread import GenerationWorker
from areal_dta.rollout_server.server import open_socket, serve
from tests.rollout_server.builders import make_generator

BODY = {"input_ids": [3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
TIMEOUT = 60.0


@pytest.fixture
def generator(model) -> BatchGenerator:
    return make_generator(model)


def make_app(model, generator: BatchGenerator, max_queued: int = 2):
    worker = GenerationWorker(generator, max_queued)
    app = RolloutApp(
        model=model,
        model_path="test",
        generator=generator,
        worker=worker,
        context_length=64,
        random_seed=1,
    )
    worker.start()
    return app.build(), worker


def run_client(app, worker, scenario: Callable[[TestClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with TestClient(TestServer(app)) as client:
            await asyncio.wait_for(scenario(client), TIMEOUT)

    try:
        asyncio.run(main())
    finally:
        worker.stop(TIMEOUT)


def test_a_failed_step_is_a_500_and_the_server_goes_on(
    model, generator, monkeypatch
) -> None:
    async def scenario(client: TestClient) -> None:
        def broken():
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(generator, "step", broken)
            async with client.post("/generate", json=BODY) as reply:
                assert reply.status == 500
                assert "out of memory" in (await reply.json())["error"]["message"]
        async with client.get("/health") as reply:
            assert reply.status == 200
        async with client.post("/generate", json=BODY) as reply:
            assert len((await reply.json())["output_ids"]) == 2

    run_client(*make_app(model, generator), scenario)


def test_a_full_queue_is_a_503(model, generator) -> None:
    async def scenario(client: TestClient) -> None:
        async def send() -> int:
            async with client.post("/generate", json=BODY) as reply:
                return reply.status

        await client.post("/pause_generation", json={})
        first = [asyncio.create_task(send()) for _ in range(2)]
        while True:
            async with client.get("/get_server_info") as reply:
                if (await reply.json())["num_waiting"] == 2:
                    break
        assert await send() == 503
        await client.post("/continue_generation", json={})
        assert await asyncio.gather(*first) == [200, 200]

    run_client(*make_app(model, generator, max_queued=2), scenario)


def kill_worker(generator: BatchGenerator, monkeypatch) -> None:
    def die(waiting):
        raise SystemError("cosmic ray")

    monkeypatch.setattr(generator, "num_admissible", die)


def test_a_dead_generation_thread_shows_in_health(
    model, generator, monkeypatch
) -> None:
    async def scenario(client: TestClient) -> None:
        async with client.get("/health") as reply:
            assert reply.status == 200
        kill_worker(generator, monkeypatch)
        for _ in range(2):
            async with client.post("/generate", json=BODY) as reply:
                assert reply.status == 503
                assert "cosmic ray" in (await reply.json())["error"]["message"]
        async with client.get("/health") as reply:
            assert reply.status == 503

    run_client(*make_app(model, generator), scenario)


def test_a_dead_generation_thread_ends_the_server(
    model, generator, monkeypatch
) -> None:
    """So that whoever watches the process or its port notices."""
    monkeypatch.setattr(server_module, "_DEAD_LINGER_SECONDS", 0.1)
    kill_worker(generator, monkeypatch)
    app, worker = make_app(model, generator)

    async def main() -> int:
        sock = open_socket("127.0.0.1", 0)
        sock.listen()  # the server may start a moment later
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/generate"
        ending = asyncio.create_task(serve(app, worker, sock))
        async with asyncio.timeout(TIMEOUT), aiohttp.ClientSession() as session:
            async with session.post(url, json=BODY) as reply:
                assert reply.status == 503
            return await ending

    assert asyncio.run(main()) == EXIT_GENERATION_DIED
