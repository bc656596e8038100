"""Requests of rollout workers: kept connections, prompt resumption, versions."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector, web
from areal.infra import RemoteInfEngine, remote_inf_engine
from areal.infra.utils import http
from areal.utils import pkg_version

from areal_dta.areal_fixes.rollout_workers import (
    PromptlyResumed,
    keep_connections,
    remember_versions,
)

pytestmark = pytest.mark.timeout(60)
STOPPED = {"meta_info": {"finish_reason": {"type": "stop"}}}
ABORTED = {"meta_info": {"finish_reason": {"type": "abort"}}}


def count_connections(endpoint: str, num_requests: int) -> int:
    """Send requests as AReaL's client does; return how many connections they took."""

    async def run() -> int:
        peers: set[Any] = set()

        async def answer(request: web.Request) -> web.Response:
            assert request.transport is not None
            peers.add(request.transport.get_extra_info("peername"))
            return web.json_response(STOPPED)

        app = web.Application()
        app.router.add_post("/{name}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        stock = TCPConnector(limit=0, force_close=True)
        async with ClientSession(connector=stock) as session:
            for _ in range(num_requests):
                result = await remote_inf_engine.arequest_with_retry(
                    session=session,
                    addr=f"127.0.0.1:{port}",
                    endpoint=endpoint,
                    payload={},
                    method="POST",
                    max_retries=1,
                    timeout=20,
                )
                assert result == STOPPED
        await runner.cleanup()
        return len(peers)

    return asyncio.run(run())


@pytest.fixture
def kept() -> Iterator[None]:
    undo = keep_connections()
    yield
    undo()


def test_without_keep_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine that was made before in this process has repaired it.
    stock = http.arequest_with_retry
    monkeypatch.setattr(remote_inf_engine, "arequest_with_retry", stock)
    assert count_connections("/generate", 4) == 4


def test_generation_requests_share_a_connection(kept: None) -> None:
    assert count_connections("/generate", 4) == 1
    assert count_connections("/generate", 4) == 1  # in another loop


def test_other_requests_are_sent_as_ever(kept: None) -> None:
    assert count_connections("/update_weights_from_disk", 3) == 3


def sleeps_of(engine_class: type[RemoteInfEngine], monkeypatch: Any) -> list[float]:
    """Interrupt an answer once; return the sleeps of its client until it is resumed."""
    slept: list[float] = []
    is_paused = [False]
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        is_paused[0] = False
        await real_sleep(0)

    async def request(**kwargs: Any) -> Any:
        is_paused[0] = not slept  # paused when the first answer comes
        return ABORTED if not slept else STOPPED

    def parse(result: Any) -> Any:
        return SimpleNamespace(
            output_tokens=[1],
            output_logprobs=[0.0],
            stop_reason=result["meta_info"]["finish_reason"]["type"],
            routed_experts=None,
        )

    async def session() -> None:
        return None

    monkeypatch.setattr(remote_inf_engine, "arequest_with_retry", request)
    monkeypatch.setattr(
        remote_inf_engine.workflow_context, "get_aiohttp_session", session
    )
    monkeypatch.setattr(asyncio, "sleep", sleep)
    undo = keep_connections()
    from areal.api import ModelRequest
    from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig

    config = InferenceEngineConfig(
        backend="sglang:d1", experiment_name="e", trial_name="t"
    )
    backend = SimpleNamespace(
        build_generation_request=lambda *args, **kwargs: SimpleNamespace(
            endpoint="/generate", payload={}, method="POST"
        ),
        parse_generation_response=parse,
    )
    engine: Any = engine_class(config, backend)  # type: ignore[arg-type]
    engine.addresses = ["127.0.0.1:1"]
    engine._workflow_executor = SimpleNamespace(is_paused=lambda: is_paused[0])
    try:
        response = asyncio.run(
            engine.agenerate(
                ModelRequest(
                    input_ids=[1, 2],
                    gconfig=GenerationHyperparameters(max_new_tokens=4),
                )
            )
        )
    finally:
        undo()
    assert response.output_tokens == [1, 1]
    return slept


def test_without_PromptlyResumed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sleeps_of(RemoteInfEngine, monkeypatch) == [0.5]


def test_an_interrupted_answer_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (seconds,) = sleeps_of(PromptlyResumed, monkeypatch)
    assert seconds <= 0.05


def count_lookups(monkeypatch: Any, change: Callable[[], Callable[[], None]]) -> int:
    looked: list[str] = []

    def version(name: str) -> str:
        looked.append(name)
        return importlib.metadata.version(name)

    monkeypatch.setattr(pkg_version, "get_version", version)
    undo = change()
    for _ in range(3):
        assert pkg_version.is_version_greater_or_equal("transformers", "5.0")
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            pkg_version.is_version_greater_or_equal("no-such-package", "1")
    undo()
    return looked.count("transformers")


def test_without_remember_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_lookups(monkeypatch, lambda: lambda: None) == 3


def test_a_version_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_lookups(monkeypatch, remember_versions) == 1
