"""What cannot work on this machine is refused before anything starts."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from areal_dta.config.composed import Composed, ConfigError
from areal_dta.config.resolved import ResolvedRun, resolve
from areal_dta.config.schema import load_object, to_structured
from areal_dta.startup import checks
from areal_dta.startup.checks import (
    check_embedded_server,
    check_run,
    gpu_note,
    num_steps,
)
from areal_dta.startup.compose import (
    compose,
    detect_hardware,
    find_config,
    num_gpus,
)

REPOSITORY = Path(__file__).parents[2]


def load(*overrides: str, name: str = "gsm8k_grpo") -> tuple[ResolvedRun, Composed]:
    composed = compose(find_config(name), ["hardware=cpu", *overrides])
    return resolve(to_structured(composed)), composed


def check(*overrides: str, name: str = "gsm8k_grpo") -> list[str]:
    return check_run(*load(*overrides, name=name))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Test GPU")


@pytest.mark.parametrize("backend", ["dta:d1", "dta:d2", "fsdp:d1", "fsdp:d2"])
def test_the_main_job_passes(no_gpu: None, backend: str) -> None:
    assert check(f"actor.backend={backend}") == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware=gpu"], "hardware=gpu, but torch .* CUDA.*; use hardware=cpu"),
        (["actor.backend=dtaa:d1"], "did you mean 'dta'"),
        (["rollout.backend=loca:d1"], "did you mean 'local'"),
        (["rollout.backend=sglang:d1"], "needs a GPU; use rollout.backend=local:d1"),
        (["actor.backend=megatron:d1"], "needs GPUs; use actor.backend=dta:d1"),
        (["actor.dta.kernel=triton_tree"], "trains on CPUs; use .*kernel=auto"),
        (["actor.dta.kernel=flash_cuda"], "actor.dta.kernel=flash_cuda, but actor"),
        (["actor.dta.kernel=flash_triton"], "actor.dta.kernel=flash_triton, but actor"),
        (["actor.dta.fused_layers=on"], "fused_layers=on, but actor trains on CPUs"),
        (["actor.weight_update_mode=xccl"], "use actor.weight_update_mode=disk"),
        (["actor.reward_norm.group_size=4"], "group_size=4 would mix prompts"),
        (["total_train_steps=0"], "total_train_steps=0; expected >= 1"),
        (["actor.enable_tree_training=true"], "enable_tree_training"),
        (["trial_name=a/b"], "trial_name='a/b' names a directory"),
        (["cluster.fileroot='/tmp/my runs'"], "without spaces"),
        (["scheduler.type=slrum"], "did you mean 'slurm'"),
        (
            ["actor.backend=fsdp:d1", "actor.attn_impl=flash_attention_2"],
            "flash-attn is not installed",
        ),
        (["actor.use_lora=true"], "local takes whole checkpoints, not adapters"),
        (["actor.kl_ctl=0.1"], "kl_ctl=0.1 needs a reference; add the section ref"),
        (["actor.is_critic=true"], "set actor.is_critic=false"),
        (["actor.dta.router_load=true"], "has no experts; set it false"),
        (["actor.dta.router_aux_loss=0.01"], "has no routers .*router_aux_loss=0"),
        (["actor.dta.router_aux_loss=-1"], "expected a number >= 0 or auto"),
        (
            ["actor.dta.router_aux_loss=0.01", "actor.backend=fsdp:d1"],
            "trained by the tree engine only; use actor.backend=dta:dN, or 0",
        ),
        (["local.dtype=float31"], "local: dtype='float31'"),
        (["reward_fn=areal_dta.tasks.math_reward.reward"], "cannot be imported"),
        (["workflow=nonsense"], "expected package.module.name"),
        (["train_dataset.path=/no/such.jsonl"], "no such file"),
        (["actor.path=/no/such/model"], "no such directory"),
    ],
)
def test_what_cannot_work(no_gpu: None, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check(*overrides)
    assert "\n" not in str(error.value)


PPO = {"name": "gsm8k_ppo"}


@pytest.mark.parametrize("backend", ["dta:d2", "fsdp:d1"])
def test_ppo_passes(no_gpu: None, backend: str) -> None:
    sections = ("actor", "critic", "ref")
    assert check(*(f"{s}.backend={backend}" for s in sections), **PPO) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic.backend=dtaa:d1", "critic.backend=dtaa:d1: unknown .* mean 'dta'"),
        ("critic.backend=dta:d1t2", "dta is data parallel only; expected dta:d2"),
        ("critic.backend=megatron:d1", "use critic.backend=dta:d1 or fsdp:d1"),
        ("critic.is_critic=false", "critic is to train values; set critic.is_critic=t"),
        ("critic.enable_tree_training=true", "critic: .*enable_tree_training"),
        ("critic.path=/no/such/model", "critic.path=/no/such/model: no such directory"),
        ("ref.backend=dat:d1", "ref.backend=dat:d1: unknown .* mean 'dta'"),
        ("ref.fsdp.offload_params=true", "ref: .*offload_params"),
        ("ref=null", "actor.kl_ctl=0.01 needs a reference"),
        ("+teacher={rollout: {backend: 'local:d1'}}", "does not score given tokens"),
        ("+teacher={rollout: {backend: 'sglng:d1'}}", "mean 'sglang'"),
        ("+teacher={rollout: {backend: 'vllm:d1'}}", "vllm is not installed"),
    ],
)
def test_what_cannot_work_in_ppo(no_gpu: None, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check(override, **PPO)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", ["dta:d2", "fsdp:d1"])
@pytest.mark.parametrize("name", ["gsm8k_sft", "gsm8k_dpo", "gsm8k_rw"])
def test_other_algorithms_pass(no_gpu: None, name: str, backend: str) -> None:
    assert check(f"actor.backend={backend}", name=name) == []


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("gsm8k_sft", "actor.backend=dta:d3", "32 examples cannot be shared evenly"),
        ("gsm8k_sft", "actor.is_critic=true", "set actor.is_critic=false"),
        ("gsm8k_dpo", "ref.backend=dat:d1", "did you mean 'dta'"),
        ("gsm8k_dpo", "ref.backend=dta:d3", "16 pairs .* ref.backend=dta:d3"),
        ("gsm8k_dpo", "actor.mb_spec.granularity=1", "set actor.mb_spec.granularity=2"),
        ("gsm8k_rw", "actor.mb_spec.granularity=1", "would tear pairs apart"),
        ("gsm8k_rw", "actor.dta.router_load=true", "has no experts"),
        (
            "gsm8k_rw",
            "dataset_fn=areal_dta.no.such",
            "cannot be imported",
        ),
    ],
)
def test_what_cannot_work_in_other_algorithms(
    no_gpu: None, name: str, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check(override, name=name)
    assert "\n" not in str(error.value)


def test_a_reward_model_of_areal_s_that_fails(one_gpu: None) -> None:
    with pytest.raises(ConfigError, match="use actor.backend=dta:dN or fsdp:dN"):
        check("hardware=gpu", "actor.backend=megatron:d1", name="gsm8k_rw")


def test_a_reference_that_is_not_used_is_told(no_gpu: None) -> None:
    messages = check("actor.kl_ctl=0", **PPO)
    assert messages == ["ref: not used, since actor.kl_ctl=0"]


@pytest.mark.parametrize("backend", ["dta:d3", "fsdp:d3"])
def test_prompts_need_not_be_a_multiple_of_the_trainers(
    no_gpu: None, backend: str
) -> None:
    check(f"actor.backend={backend}", "train_dataset.batch_size=5")


def test_switched_off_settings_are_told(no_gpu: None) -> None:
    (message,) = check("actor.gradient_checkpointing=true")
    assert message.startswith("actor: gradient_checkpointing=true is switched off")


def test_a_directory_without_a_model(no_gpu: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no config.json"):
        check(f"actor.path={tmp_path}")


def test_a_hub_model_that_cannot_be_reached(no_gpu: None) -> None:
    # tests/conftest.py takes the hub offline
    with pytest.raises(ConfigError, match="nobody/nothing cannot be loaded") as error:
        check("actor.path=nobody/nothing")
    assert "\n" not in str(error.value)


class TestHardware:
    def test_without_a_gpu(self, no_gpu: None) -> None:
        choice, reason = detect_hardware()
        assert choice == "cpu"
        assert "CUDA" in reason

    def test_with_a_gpu(self, one_gpu: None) -> None:
        assert detect_hardware() == ("gpu", "found 1 x Test GPU")

    def test_more_trainers_than_gpus(self, one_gpu: None) -> None:
        with pytest.raises(ConfigError, match="needs 2 GPUs, this machine has 1"):
            check("hardware=gpu", "actor.backend=dta:d2")

    def test_sharing_gpus_is_told(self, one_gpu: None) -> None:
        note = gpu_note(load("hardware=gpu")[0])
        assert note == ["2 processes share 1 GPUs"]

    def test_rollout_server_that_is_not_installed(
        self, one_gpu: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="pip install vllm"):
            check("hardware=gpu", "rollout.backend=vllm:d1")

    def test_count(self, one_gpu: None) -> None:
        assert num_gpus() == 1


@pytest.mark.parametrize(
    ("prompts", "overrides", "steps"),
    [
        (100, ["total_train_steps=null"], 6),
        (100, ["total_train_steps=null", "total_train_epochs=2"], 12),
        (100, ["total_train_steps=5"], 5),
        (100, ["total_train_steps=50"], 6),
    ],
)
def test_number_of_steps(prompts: int, overrides: list[str], steps: int) -> None:
    run, _ = load("train_dataset.batch_size=16", *overrides)
    assert num_steps(run.config, prompts) == steps


def test_too_few_prompts() -> None:
    with pytest.raises(ConfigError, match="holds 15 prompts, fewer than one batch"):
        num_steps(load()[0].config, 15)


def test_load_object() -> None:
    assert load_object("json.dumps", "key") is json.dumps


@pytest.mark.parametrize("path", ["json.dump_", "no_such_module.x", "dumps", ""])
def test_load_object_fails_in_one_line(path: str) -> None:
    with pytest.raises(ConfigError, match="^key=.* cannot be imported") as error:
        load_object(path, "key")
    assert "\n" not in str(error.value)


def test_queue_follows_from_the_configuration(monkeypatch, no_gpu) -> None:
    many = [
        "train_dataset.batch_size=256",
        "gconfig.n_samples=32",
        "rollout.max_concurrent_rollouts=256",
    ]
    run, _ = load(*many)
    needed = run.config.num_requests_in_flight()
    assert needed >= 8192
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1_000_000))
    assert run.config.local.queue_limit(needed) == needed
    check_embedded_server(run.config)
    run.config.local.max_queued_requests = 4096
    with pytest.raises(ConfigError, match="max_queued_requests=4096"):
        check_embedded_server(run.config)
    run.config.local.max_queued_requests = None
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    with pytest.raises(ConfigError, match="only 4096 files"):
        check_embedded_server(run.config)
