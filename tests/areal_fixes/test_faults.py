"""Each fault that a repair is for is still there without it.

One test per record of the registry, named ``test_without_`` and what repairs it. When
one fails, upstream has mended the fault: drop the repair. That the fault is gone with
the repair is shown here too where it takes a line, and otherwise by the repair's own
tests.
"""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from areal.api import Job
from areal.api.cli_args import (
    NameResolveConfig,
    NormConfig,
)
from areal.infra.rpc import rtensor
from areal.infra.scheduler.local import LocalScheduler
from areal.infra.scheduler.slurm import SlurmScheduler
from areal.utils import name_resolve
from areal.utils.data import Normalization, broadcast_tensor_container
from areal.utils.recover import RecoverHandler

from areal_dta.areal_fixes.loopback import LOOPBACK, bypass_proxies
from areal_dta.areal_fixes.registry import REPAIRS
from areal_dta.areal_fixes.training_engines import (
    keep_lone_payloads,
    read_own_results,
)
from tests.areal_fixes import (
    test_faults_of_proxy_and_loggers,
    test_faults_of_trainer_steps,
    test_rollout_workers,
)
from tests.areal_fixes.slots import Engine, dump, handler, load
from tests.areal_fixes.test_slurm_scheduler import SPEC, sbatch_script, slurm_config

pytestmark = pytest.mark.timeout(120)


def test_every_repair_has_its_fault_here() -> None:
    prefix = "test_without_"
    others = (
        test_faults_of_proxy_and_loggers,
        test_faults_of_trainer_steps,
        test_rollout_workers,
    )
    found = {**globals(), **{k: v for x in others for k, v in vars(x).items()}}
    tested = {name for name in found if name.startswith(prefix)}
    assert tested == {prefix + repair.name.split(".")[1] for repair in REPAIRS}


def test_without_slots_for_recovery(tmp_path: Path) -> None:
    """A checkpoint that is being written destroys the one before."""
    stock: Any = handler(tmp_path, RecoverHandler)
    dump(stock, Engine("old"), 0)
    broken = Engine("new")
    broken.error = OSError("killed while writing")
    with pytest.raises(OSError, match="killed"):
        dump(stock, broken, 1)
    info, engine, _ = load(tmp_path, RecoverHandler)
    assert info.last_step_info.global_step == 0
    assert engine.weight == "n"  # half of the new one


def test_without_RecoverableEngine() -> None:
    """A failure passes by whoever answers calls; and no schedule is saved."""
    from areal.engine.fsdp_utils.checkpoint import DCPState
    from torch.distributed.checkpoint.api import CheckpointException

    assert not issubclass(CheckpointException, Exception)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert sorted(DCPState(model, optimizer).state_dict()) == ["model", "optim"]


def test_without_BoundedLocalScheduler(tmp_path: Path) -> None:
    service = NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path))
    stock = LocalScheduler(
        fileroot=str(tmp_path),
        experiment_name="e",
        trial_name="t",
        nfs_record_root=service.nfs_record_root,
        gpu_devices=[],
        startup_timeout=1.0,
    )
    # ports follow the seed
    drawn = []
    for _ in range(2):
        random.seed(1)
        drawn.append(stock._allocate_ports(4))
        stock._allocated_ports.clear()
    assert drawn[0] == drawn[1]
    # a forked worker is given 60 s
    waits = inspect.signature(LocalScheduler._wait_for_fork_ready).parameters
    assert waits["timeout"].default == 60
    # a worker that has died is waited for, beyond the time-out
    worker: Any = MagicMock()
    worker.process.poll.return_value = 1
    polled = threading.Event()
    give_up_at = time.monotonic() + 3.0

    def never_ready(info: Any) -> bool:
        if time.monotonic() > give_up_at:
            polled.set()
            raise InterruptedError("enough")
        return False

    stock._is_worker_ready = never_ready  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        stock._configure_worker(worker, 0)
    assert polled.is_set()


def test_without_BoundedSlurmScheduler(tmp_path: Path) -> None:
    stock = SlurmScheduler(exp_config=slurm_config(tmp_path, n_gpus_per_node=8))
    script = sbatch_script(stock)
    assert "singularity exec" in script
    assert "--mpi=pmi2" in script
    without_gpus = SlurmScheduler(exp_config=slurm_config(tmp_path, n_gpus_per_node=0))
    with pytest.raises(ZeroDivisionError):
        without_gpus.create_workers(Job(replicas=1, tasks=[SPEC], role="actor"))


def test_without_use_loopback() -> None:
    import areal.infra.scheduler.local as scheduler
    from areal.utils.network import gethostip

    assert not inspect.signature(scheduler.LocalScheduler).parameters.keys() & {
        "host",
        "address",
        "bind_host",
    }
    if gethostip() == LOOPBACK:
        pytest.skip("this machine has no other address")
    assert scheduler.gethostip() != LOOPBACK


def test_without_bypass_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's answer is taken for that of a worker that is not there."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    worker = MagicMock(ip=LOOPBACK, worker_ports=["9"])  # nobody listens there
    with ThreadingHTTPServer((LOOPBACK, 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://{LOOPBACK}:{proxy.server_port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "")
        try:
            ready = partial(
                LocalScheduler._is_worker_ready, MagicMock(), MagicMock(worker=worker)
            )
            assert ready()
            bypass_proxies()
            assert not ready()
        finally:
            proxy.shutdown()


def test_without_ray_on_loopback() -> None:
    import ray
    from ray._private import services

    assert "node_ip_address" not in inspect.signature(ray.init).parameters
    if (address := services.get_node_ip_address()) == LOOPBACK:
        pytest.skip("this machine has no other address")
    assert address != LOOPBACK


def test_without_load_when_saved(tmp_path: Path) -> None:
    """Weights that are saved just after a worker's look are seen a second later."""
    name_resolve.reconfigure(
        NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path))
    )
    timer = threading.Timer(0.05, lambda: name_resolve.add("saved", "now"))
    started = time.monotonic()
    timer.start()
    name_resolve.wait("saved", timeout=10)
    timer.join()
    assert time.monotonic() - started >= 1.0  # sleeps that long between two looks


def test_without_PairRewards() -> None:
    from areal.trainer.rw.rw_engine import RWController, RWEngine

    data = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "attention_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(KeyError, match="cu_seqlens"):
        RWEngine(MagicMock()).train_rw([data])
    controller: Any = MagicMock()
    RWController.train_rw(controller, [data])
    (call,) = controller._custom_function_call.mock_calls
    assert call.kwargs.get("group_size", 1) == 1


def test_without_keep_lone_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven collectives for three numbers, though no other rank is there."""
    from areal.infra.rpc.guard import engine_blueprint as server

    original = broadcast_tensor_container
    monkeypatch.setattr(server, "broadcast_tensor_container", original)
    sent: list[Any] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *a, **k: sent.append(a))
    num_ranks = 1
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: num_ranks)
    payload = [{"a": 1, "b": [2]}]
    assert server.broadcast_tensor_container(payload) == payload
    assert len(sent) == 7
    sent.clear()

    undo = keep_lone_payloads()
    assert server.broadcast_tensor_container(payload) is payload
    assert not sent
    num_ranks = 2
    server.broadcast_tensor_container(payload)
    assert len(sent) == 7
    keep_lone_payloads()()  # a second one changes nothing
    undo()
    assert server.broadcast_tensor_container is original


def test_without_read_own_results() -> None:
    backend = rtensor.HttpRTensorBackend()
    results = [torch.arange(6.0).reshape(2, 3).T, torch.ones(2, dtype=torch.bool)]
    mine = rtensor.RTensor.remotize(results, node_addr="127.0.0.1:1")
    shards = [x.shard for x in mine]
    other = rtensor.TensorShardInfo(shard_id="another's", node_addr="127.0.0.1:1")
    original = rtensor.HttpRTensorBackend._fetch_shard_group
    asked: list[Any] = []

    async def ask(self: Any, session: Any, node_addr: str, grouped: Any) -> Any:
        asked.append(grouped)
        return [torch.zeros(1) for _ in grouped]

    rtensor.HttpRTensorBackend._fetch_shard_group = ask
    try:
        backend.fetch(shards)
        assert len(asked) == 1
        undo = read_own_results()
        found = backend.fetch(shards)
        assert len(asked) == 1
        for a, b in zip(found, results, strict=True):
            assert torch.equal(a, b) and a.is_contiguous()
            assert a.data_ptr() != b.data_ptr()
        backend.fetch([*shards, other])
        assert len(asked) == 2
        undo()
        assert rtensor.HttpRTensorBackend._fetch_shard_group is ask
    finally:
        rtensor.HttpRTensorBackend._fetch_shard_group = original
        for shard in shards:
            rtensor.remove(shard.shard_id)


def test_without_ItemNormalization() -> None:
    """Three rows of one prompt and one of another, in slices of two."""
    config = NormConfig(mean_level="group", std_level=None, group_size=2)
    rewards = torch.tensor([1.0, 2.0, 3.0, 9.0])
    assert Normalization(config)(rewards).tolist() == [-0.5, 0.5, -3.0, 3.0]


def test_without_drop_unreduced_gradients() -> None:
    """The gradients of a pass that failed are added to those of the next."""
    code = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 1, bias=False)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
model.set_requires_gradient_sync(False)
model(torch.ones(1, 2)).sum().backward()  # and here the pass fails
model.set_requires_gradient_sync(True)
model.zero_grad()
model(torch.ones(1, 2)).sum().backward()
print("gradient", model.weight.grad.full_tensor().tolist())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110
    )
    assert "gradient [[2.0, 2.0]]" in result.stdout, result.stderr
