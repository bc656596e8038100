"""Fetching of tensors: time limit and counts."""

import socket
import time
from types import SimpleNamespace

import pytest
import torch
from areal.infra.rpc import rtensor
from areal.infra.rpc.rtensor import RTensor, TensorShardInfo

from areal_dta.collector.remote_tensors import FetchMeter, fetch


def test_a_worker_that_does_not_answer_is_given_up_in_time():
    """0.1.0 waited for an hour, three times over."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        shard = TensorShardInfo("any", f"127.0.0.1:{silent.getsockname()[1]}")
        undo = FetchMeter(timeout_seconds=0.1).install()
        try:
            started = time.monotonic()
            with pytest.raises(RuntimeError, match="after 3 attempts"):
                fetch([{"x": RTensor(shard, torch.zeros(1, device="meta"))}], ["x"])
            assert time.monotonic() - started < 60
        finally:
            undo()


def test_what_is_fetched_is_counted():
    meter = FetchMeter(1.0)
    meter._backend = SimpleNamespace(fetch=lambda shards: [torch.zeros(3)] * 2)
    undo = meter.install()
    try:
        shards = [TensorShardInfo(f"count {i}", "nowhere:1") for i in range(2)]
        item = {
            f"x{i}": RTensor(s, torch.zeros(3, device="meta"))
            for i, s in enumerate(shards)
        }
        fetch([item], list(item))
        fetch([item], list(item))  # AReaL's buffer has them
    finally:
        undo()
        rtensor.clear_fetch_buffer(shard.shard_id for shard in shards)
    metrics = meter.take_metrics()
    assert metrics["collector/fetched_bytes"] == 24
    assert metrics["collector/fetched_tensors"] == 2
    assert meter.take_metrics()["collector/fetched_bytes"] == 0
