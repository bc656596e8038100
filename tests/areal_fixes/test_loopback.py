"""Processes of a run on one machine stay off the network."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import requests

from areal_dta.areal_fixes.loopback import (
    LOOPBACK,
    LOOPBACK_ENV,
    bypass_proxies,
    ray_on_loopback,
    use_loopback,
    workers_on_loopback,
)


def test_everybody_sees_it_until_it_is_undone() -> None:
    import areal.infra.controller.rollout_controller as controller
    import areal.infra.scheduler.local as scheduler
    import areal.utils.network as network

    original = network.gethostip
    undo = use_loopback()
    try:
        addresses = [m.gethostip() for m in (network, controller, scheduler)]
        assert addresses == [LOOPBACK] * 3
        assert os.environ | LOOPBACK_ENV == os.environ
    finally:
        undo()
    assert controller.gethostip is scheduler.gethostip is original
    assert not os.environ.keys() & LOOPBACK_ENV.keys()


def test_workers_are_started_by_our_module() -> None:
    areal = SimpleNamespace(
        cmd="python -m areal.infra.rpc.rpc_server", env_vars={"A": "1"}
    )
    own = SimpleNamespace(cmd="python -m mine", env_vars={})
    workers_on_loopback([SimpleNamespace(scheduling_spec=[areal, own])])
    assert areal.cmd == "python -m areal_dta.areal_fixes.loopback"
    assert areal.env_vars == {"A": "1", **LOOPBACK_ENV}
    assert own.cmd == "python -m mine"


def test_ray_sees_it_until_it_is_undone() -> None:
    from ray._private import ray_constants, services

    before = ray_constants.ENABLE_RAY_CLUSTER, dict(os.environ)
    undo = ray_on_loopback()
    try:
        assert services.get_node_ip_address() == LOOPBACK
    finally:
        undo()
    assert (ray_constants.ENABLE_RAY_CLUSTER, dict(os.environ)) == before


def test_loopback_is_reached_past_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "intranet.example")
    monkeypatch.setenv("NO_PROXY", "")
    bypass_proxies()
    for host in ("127.0.0.1", "localhost", "[::1]", "intranet.example"):
        url = f"http://{host}:1234/health"
        assert not requests.utils.get_environ_proxies(url), host
    assert requests.utils.get_environ_proxies("http://example.org")
    before = os.environ["NO_PROXY"]
    bypass_proxies()
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == before
