"""Started, paused, updated and reaped by AReaL's controller, in a worker process."""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from areal.api import WeightUpdateMeta
from areal.api.cli_args import (
    InferenceEngineConfig,
    NameResolveConfig,
    SchedulingSpec,
)
from areal.infra.rpc.rtensor import RTensor
from areal.infra.scheduler.local import LocalScheduler
from areal.utils import name_resolve, names
from transformers import PreTrainedModel

from areal_dta.config.server_options import LocalServerConfig
from areal_dta.rollout_server.areal_backend import LocalEngine
from tests.rollout_server.builders import (
    RunningServer,
    is_gone,
    max_difference,
    model_for_generation,
    oracle_logprobs,
)

TIMEOUT = 300.0


@pytest.mark.slow
def test_a_controllers_life(model, model_path: Path, tmp_path: Path) -> None:
    identity = {
        "experiment_name": "test-local-controller",
        "trial_name": "trial",
        "fileroot": str(tmp_path),
    }
    records = {"nfs_record_root": str(tmp_path / "names")}
    name_resolve.reconfigure(NameResolveConfig(type="nfs", **records))
    scheduler = LocalScheduler(startup_timeout=TIMEOUT, **identity, **records)
    config = InferenceEngineConfig(
        backend="sglang:d1",
        setup_timeout=TIMEOUT,
        request_timeout=TIMEOUT,
        consumer_batch_size=4,
        scheduling_spec=(
            SchedulingSpec(
                cpu=1,
                gpu=0,
                mem=1,
                port_count=2,
                cmd="python -m areal.infra.rpc.rpc_server",
            ),
        ),
        **identity,
    )
    controller = LocalEngine.as_controller(config, scheduler)
    pids: list[int] = []

    def check_rollouts(model: PreTrainedModel, version: int) -> None:
        prompts = [[3, 1, 4], [1], [5, 9]]
        trajectories = controller.rollout_batch(
            [{"prompt": prompt} for prompt in prompts],
            workflow="tests.rollout_server.workflow.GenerateWorkflow",
            workflow_kwargs={"max_new_tokens": 8},
            group_size=2,
        )
        assert len(trajectories) == 3
        for trajectory in RTensor.localize(trajectories):
            assert trajectory["input_ids"].shape[0] == 2
            for row in range(2):
                ids = trajectory["input_ids"][row].tolist()
                num_prompt = len(ids) - 8
                assert ids[:num_prompt] in prompts
                assert (
                    trajectory["versions"][row, num_prompt:].tolist() == [version] * 8
                )
                logprobs = trajectory["logprobs"][row, num_prompt:].tolist()
                expected = oracle_logprobs(
                    model, ids[:num_prompt], ids[num_prompt:], 1.0
                )
                assert max_difference(logprobs, expected) < 1e-5

    try:
        server_args = asdict(LocalServerConfig(model_path=str(model_path)))
        controller.initialize(role="rollout", server_args=server_args)
        (info,) = controller.server_infos
        assert info.host == "127.0.0.1"
        server = RunningServer(info.port, info.process)
        pids = [server.info()["pid"]]
        pids += [parent.pid for parent in psutil.Process(pids[0]).parents()[:1]]

        check_rollouts(model, version=0)

        new = model_for_generation(seed=1)
        new.save_pretrained(tmp_path / "new")
        controller.set_version(1)
        key = names.update_weights_from_disk(
            identity["experiment_name"], identity["trial_name"], 1
        )
        name_resolve.add(key, str(time.time()))
        asyncio.run(controller.pause_generation())
        assert server.info()["holds"] == ["paused"]
        meta = WeightUpdateMeta(type="disk", path=str(tmp_path / "new"))
        asyncio.run(controller.update_weights_from_disk(meta))
        asyncio.run(controller.continue_generation())
        check_rollouts(new, version=1)
    finally:
        controller.destroy()
        scheduler.delete_workers()
    assert len(pids) == 2 and all(is_gone(pid) for pid in pids)
