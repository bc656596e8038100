"""AReaL's own client against the local server."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from areal.api import ModelRequest, WeightUpdateMeta
from areal.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    NameResolveConfig,
)
from areal.infra import RolloutController
from areal.utils import name_resolve, names

from areal_dta.config.server_options import TOKEN_VARIABLE, LocalServerConfig
from areal_dta.rollout_server.areal_backend import (
    LocalBackend,
    LocalEngine,
    ServerExitedError,
)
from areal_dta.rollout_server.server import EXIT_PORT_IN_USE
from tests.rollout_server.builders import (
    CONTEXT_LENGTH,
    RunningServer,
    free_port,
    is_gone,
    max_difference,
    model_for_generation,
    oracle_logprobs,
    wait_until,
)

TIMEOUT = 120.0


def engine_config(**options) -> InferenceEngineConfig:
    defaults = {
        "backend": "sglang:d1",
        "experiment_name": "test-local-rollout",
        "trial_name": "trial",
        "setup_timeout": TIMEOUT,
        "request_timeout": TIMEOUT,
        "request_retries": 1,
        "max_concurrent_rollouts": 4,
    }
    return InferenceEngineConfig(**{**defaults, **options})


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(engine_config())
    args = asdict(LocalServerConfig(model_path=str(model_path)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, "s3cret")
        info = engine.launch_server(args)
        try:
            assert info.host == "127.0.0.1"
            engine.initialize(train_data_parallel_size=1)
            yield engine
        finally:
            engine.destroy()
    assert is_gone(info.process.pid)


@pytest.fixture(scope="module")
def launched(engine: LocalEngine) -> RunningServer:
    info = engine._engine.local_server_processes[0]
    return RunningServer(info.port, info.process)


def generate(engine: LocalEngine, prompt: list[int], **options):
    request = ModelRequest(
        input_ids=prompt, gconfig=GenerationHyperparameters(**options)
    )
    return asyncio.run(asyncio.wait_for(engine.agenerate(request), TIMEOUT))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate(engine: LocalEngine, model, temperature: float) -> None:
    engine.set_version(3)
    response = generate(
        engine, [3, 1, 4], max_new_tokens=12, temperature=temperature, ignore_eos=True
    )
    assert response.input_tokens == [3, 1, 4] and response.stop_reason == "length"
    assert response.output_versions == [3] * 12
    expected = oracle_logprobs(model, [3, 1, 4], response.output_tokens, temperature)
    assert max_difference(response.output_logprobs, expected) < 1e-5


def test_greedy(engine: LocalEngine, model) -> None:
    response = generate(engine, [3, 1, 4], max_new_tokens=6, greedy=True)
    for i, token in enumerate(response.output_tokens):
        context = torch.tensor([[3, 1, 4, *response.output_tokens[:i]]])
        assert int(model(context).logits[0, -1].argmax()) == token


def test_hit_rates_are_reported(
    engine: LocalEngine, launched: RunningServer, monkeypatch
) -> None:
    engine.export_stats()
    prompt = [7, *range(20, 40)]
    for _ in range(2):  # the second one finds all tokens but the last
        generate(engine, prompt, max_new_tokens=2, ignore_eos=True)
    stats = engine.export_stats()
    assert stats["rollout/prompt_tokens"] == 42
    assert stats["rollout/cached_prompt_tokens"] == 20
    controller = LocalEngine.as_controller(engine_config(), scheduler=None)
    monkeypatch.setattr(
        controller, "_collective_rpc", lambda **kwargs: [stats, stats, {}]
    )
    exported = controller.export_stats()
    assert exported["rollout/prefix_hit_rate"] == pytest.approx(10 / 21)
    assert launched.info()["num_cached_tokens"] >= 20


def test_refusals_reach_the_user(engine: LocalEngine) -> None:
    with pytest.raises(RuntimeError, match=f"context of {CONTEXT_LENGTH}"):
        generate(engine, [3], max_new_tokens=CONTEXT_LENGTH)
    with pytest.raises(RuntimeError, match="frequency_penalty"):
        generate(engine, [3], max_new_tokens=3, frequency_penalty=1.0)


def test_an_interrupted_answer_is_resumed(
    engine: LocalEngine, launched: RunningServer, model
) -> None:
    """AReaL's weight update: pause, new version, continue; the client sends again."""
    num_tokens = 1500
    engine.set_version(0)
    responses = []
    thread = threading.Thread(
        target=lambda: responses.append(
            generate(
                engine,
                [3, 1, 4],
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                temperature=0.7,
            )
        )
    )
    thread.start()
    for version in (1, 2):
        wait_until(lambda: launched.info()["num_running"] == 1, "running", TIMEOUT)
        time.sleep(0.05)  # for some tokens; how many does not matter
        engine.pause_generation()
        wait_until(lambda: launched.info()["num_waiting"] == 1, "sent again", TIMEOUT)
        assert launched.info()["num_running"] == 0
        engine.set_version(version)
        engine.continue_generation()
    thread.join(TIMEOUT)
    (response,) = responses
    assert response.stop_reason == "length"
    assert len(response.output_tokens) == num_tokens
    assert response.output_versions == sorted(response.output_versions)
    assert set(response.output_versions) == {0, 1, 2}
    assert model.config.eos_token_id not in response.output_tokens[:-1]
    expected = oracle_logprobs(model, [3, 1, 4], response.output_tokens, 0.7)
    assert max_difference(response.output_logprobs, expected) < 1e-5


def update(engine: LocalEngine, path: Path) -> None:
    config = engine.config
    key = names.update_weights_from_disk(
        config.experiment_name, config.trial_name, engine.get_version()
    )
    name_resolve.add(key, str(time.time()), replace=True)
    meta = WeightUpdateMeta(
        type="disk", path=str(path), clear_checkpoint_after_load=False
    )
    engine.update_weights_from_disk(meta).result(TIMEOUT)


@pytest.fixture
def name_records(tmp_path: Path) -> None:
    name_resolve.reconfigure(
        NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path / "names"))
    )


def test_weights_from_disk(
    engine: LocalEngine, model, model_path: Path, tmp_path: Path, name_records
) -> None:
    new = model_for_generation(seed=1)
    new.save_pretrained(tmp_path / "new")
    engine.pause_generation()
    update(engine, tmp_path / "new")
    engine.continue_generation()
    try:
        response = generate(engine, [3, 1, 4], max_new_tokens=8, ignore_eos=True)
        expected = oracle_logprobs(new, [3, 1, 4], response.output_tokens, 1.0)
        assert max_difference(response.output_logprobs, expected) < 1e-5
        with pytest.raises(RuntimeError, match="not a directory"):
            update(engine, tmp_path / "nowhere")
    finally:
        update(engine, model_path)


def test_teacher_logprobs(engine: LocalEngine, model) -> None:
    sequence = [3, 1, 4, 1, 5, 9]
    trajectory = {
        "input_ids": torch.tensor([[*sequence, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 6 + [0, 0]]),
        "loss_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0]]),
    }
    (logprobs,) = engine.compute_logp([trajectory])
    expected = oracle_logprobs(model, sequence[:3], sequence[3:], 1.0)
    assert max_difference(logprobs[0, 3:6].tolist(), expected) < 1e-5


def test_memory_round_trip(engine: LocalEngine, launched: RunningServer) -> None:
    engine.offload()
    assert launched.info()["holds"] == ["memory released"]
    engine.onload()
    assert (
        len(generate(engine, [3], max_new_tokens=2, ignore_eos=True).output_tokens) == 2
    )


def test_min_new_tokens_counts_what_was_generated_before_an_interruption() -> None:
    backend = LocalBackend()
    request = ModelRequest(
        input_ids=[1, 2, 3], gconfig=GenerationHyperparameters(min_new_tokens=10)
    )

    def remaining() -> int:
        built = backend.build_generation_request(request, with_lora=False, version=0)
        return built.payload["sampling_params"]["min_new_tokens"]

    assert remaining() == 10
    request.input_ids += [4] * 7
    assert remaining() == 3
    request.input_ids += [4] * 7
    assert remaining() == 0
    with pytest.raises(ValueError, match="LoRA"):
        backend.build_generation_request(request, with_lora=True, version=0)


def test_health_checks_ignore_proxies(
    launched: RunningServer, engine, monkeypatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert engine._engine.check_health(launched.url)
    assert not engine._engine.check_health(f"http://127.0.0.1:{free_port()}")


def test_requests_need_the_runs_token(engine: LocalEngine, launched) -> None:
    assert launched.generate([3], max_new_tokens=1).status_code == 401
    command = " ".join(psutil.Process(launched.process.pid).cmdline())
    assert "s3cret" not in command


def test_requests_ignore_proxies(engine: LocalEngine, monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    response = generate(engine, [3], max_new_tokens=2, ignore_eos=True)
    assert len(response.output_tokens) == 2


def test_wrong_options_start_nothing(model_path: Path) -> None:
    engine = LocalEngine(engine_config())
    args = asdict(LocalServerConfig(model_path=str(model_path)))
    for change, message in (
        ({"dtype": "fp8"}, "dtype"),
        ({"host": "0.0.0.0"}, "allow_remote"),
        ({"mem_fraction_static": 0.8}, "mem_fraction_static"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.launch_server({**args, **change})
    assert not engine._engine.local_server_processes


def test_a_server_that_ends_early_is_noticed(
    launched: RunningServer, model_path: Path
) -> None:
    engine = LocalEngine(engine_config())
    config = LocalServerConfig(model_path=str(model_path), port=launched.port)
    # Not the health of whoever has the port: the process that was started is watched.
    with pytest.raises(ServerExitedError, match="log of the rollout worker") as info:
        engine.launch_server(asdict(config))
    assert info.value.exit_code == EXIT_PORT_IN_USE
    assert not engine._engine.local_server_processes


def test_a_server_that_is_not_ready_in_time_is_ended(
    model_path: Path, monkeypatch
) -> None:
    started: list[subprocess.Popen] = []
    engine = LocalEngine(engine_config(setup_timeout=0.5))

    def launch(args) -> subprocess.Popen:
        command = [sys.executable, "-c", "import time; time.sleep(100)"]
        started.append(subprocess.Popen(command))
        return started[0]

    monkeypatch.setattr(engine._engine.backend, "launch_server", launch)
    with pytest.raises(TimeoutError, match="setup_timeout"):
        engine.launch_server(asdict(LocalServerConfig(model_path=str(model_path))))
    assert is_gone(started[0].pid)
    assert not engine._engine.local_server_processes


def test_controller() -> None:
    controller = LocalEngine.as_controller(engine_config(), scheduler=None)
    assert isinstance(controller, RolloutController)
    assert controller.inf_engine is LocalEngine
    with pytest.raises(ValueError, match="v1 controller"):
        LocalEngine.as_controller(engine_config(_version="v2"), scheduler=None)
