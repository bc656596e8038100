"""What is refused or switched off, told from the configuration alone."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from areal.api.cli_args import FSDPEngineConfig, PPOCriticConfig
from transformers import Qwen3Config

from areal_dta.config.engine_options import DTAOptions
from areal_dta.engine import DTAPPOActor, DTAPPOCritic
from areal_dta.engine.setting_checks import check_actor_config, effective_config
from areal_dta.executor import UnsupportedModelError
from areal_dta.executor.model_refusals import check_unloaded_model
from tests.engine.builders import actor_config, save_tiny_model, value_config

ROOT = Path(__file__).parents[2]


def config(**overrides):
    return actor_config(Path("somewhere"), **overrides)


def test_a_plain_configuration_passes_silently():
    assert check_actor_config(config()) == []
    assert check_actor_config(config(backend="dta:d4")) == []


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"backend": "dta:d2t2"}, "tensor parallelism of 2"),
        ({"backend": "fsdp:d1c2"}, "context parallelism of 2"),
        ({"backend": "dta:d1p2"}, "pipeline parallelism of 2"),
        ({"backend": "dta:d1e4"}, "expert parallelism of 4"),
        ({"backend": "megatron:d1"}, "expected dta:dN"),
        ({"enable_tree_training": True}, "AReaL's own tree attention"),
        ({"_version": "v2"}, "use _version=v1"),
        ({"use_kernels": True}, "kernels"),
        ({"fsdp": FSDPEngineConfig(offload_params=True)}, "offload_params=true"),
        ({"fsdp": FSDPEngineConfig(per_layer_optim_step=True)}, "per_layer_optim"),
        (
            {"m2_threshold": 0.1, "dta": SimpleNamespace(loss_scope="sequence")},
            "M2PO masks across the whole",
        ),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)
def test_refusals_name_what_was_got(overrides, message):
    with pytest.raises(ValueError, match="tree engine cannot run") as error:
        check_actor_config(config(**overrides))
    assert message in str(error.value)


def test_a_critic_of_a_multimodal_checkpoint_is_refused(tmp_path):
    from transformers import Mistral3Config

    from areal_dta.engine import DTAPPOCritic
    from tests.engine.builders import value_config

    Mistral3Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mistral3. cannot be trained to give values"):
        DTAPPOCritic(value_config(PPOCriticConfig, tmp_path))


def test_fp8_is_refused():
    asked = config()
    asked.archon.fp8_config.mode = "blockwise"
    with pytest.raises(ValueError, match="fp8"):
        check_actor_config(asked)


def test_all_refusals_come_at_once():
    with pytest.raises(ValueError) as error:
        check_actor_config(
            config(temperature=0.0, use_kernels=True, backend="dta:d1t2")
        )
    message = str(error.value)
    assert "\n" not in message
    assert all(
        part in message for part in ("(1) backend", "(2) use_ker", "(3) temperature")
    )


@pytest.mark.parametrize(
    "overrides, field, value",
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing", False),
        ({"pad_to_maximum": True}, "pad_to_maximum", False),
        ({"attn_impl": "flash_attention_2"}, "attn_impl", "sdpa"),
    ],
    ids=str,
)
def test_what_is_switched_off_is_said(overrides, field, value):
    asked = config(**overrides)
    before = dataclasses.asdict(asked)
    messages = check_actor_config(asked)
    assert len(messages) == 1 and field in messages[0]
    assert getattr(effective_config(asked), field) == value
    assert dataclasses.asdict(asked) == before


def test_our_backend_is_translated_for_areal():
    assert effective_config(config(backend="dta:d3")).backend == "fsdp:d3"


def test_dropout():
    dropping = Qwen3Config(num_hidden_layers=1, attention_dropout=0.1)
    with pytest.raises(ValueError, match="attention_dropout=0.1.*disable_dropout=true"):
        check_unloaded_model(dropping)
    messages = check_unloaded_model(dropping, disable_dropout=True)
    assert len(messages) == 1 and "switched off" in messages[0]
    assert check_unloaded_model(Qwen3Config(num_hidden_layers=1)) == []


def test_the_engine_refuses_before_it_loads_anything(tmp_path, world):
    model = save_tiny_model(tmp_path, attention_dropout=0.1)
    for weights in model.glob("*.safetensors"):
        weights.unlink()  # an attempt to load them would say so
    with pytest.raises(ValueError, match="use_kernels"):
        DTAPPOActor(actor_config(model, use_kernels=True))
    with pytest.raises(ValueError, match="dropout"):
        DTAPPOActor(actor_config(model))
    DTAPPOActor(actor_config(model, disable_dropout=True))


def test_an_algorithm_gets_the_kind_of_model_that_it_trains(tiny_critic):
    critic = value_config(PPOCriticConfig, tiny_critic)
    DTAPPOCritic(critic)
    with pytest.raises(ValueError, match="dropout .p=0.1.*set disable_dropout=true"):
        DTAPPOCritic(value_config(PPOCriticConfig, tiny_critic, disable_dropout=False))
    critic.is_critic = False
    for refuse in (
        lambda: DTAPPOCritic(critic),
        lambda: DTAPPOCritic.as_controller(critic, None),
    ):
        with pytest.raises(ValueError, match="trains values; set is_critic=true"):
            refuse()
    with pytest.raises(ValueError, match="a language model; set is_critic=false"):
        DTAPPOActor(actor_config(tiny_critic, is_critic=True))


def test_a_model_that_cannot_be_split_is_refused(tmp_path):
    model = save_tiny_model(
        tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0}
    )
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        DTAPPOActor(actor_config(model))


def test_switched_off_dropout_trains_as_without(tmp_path, tiny_model, world):
    from tests.engine.builders import build_engine, grpo_batch, relative_error
    from tests.engine.checks import train_once

    dropping = save_tiny_model(tmp_path, attention_dropout=0.5)
    engine = build_engine(DTAPPOActor, actor_config(dropping, disable_dropout=True))
    plain = build_engine(DTAPPOActor, actor_config(tiny_model))
    batch = grpo_batch()
    actual, expected = train_once(engine, batch), train_once(plain, batch)
    assert relative_error(actual["gradients"], expected["gradients"]) < 1e-6


def test_expert_load_needs_experts(tiny_model):
    config = actor_config(tiny_model, dta=DTAOptions(router_load=True))
    with pytest.raises(ValueError, match="router_load: Qwen3ForCausalLM has no router"):
        DTAPPOActor(config)


def test_parallelism_is_refused_by_the_engine_too(tiny_model, world):
    from areal.api import ParallelStrategy

    engine = DTAPPOActor(actor_config(tiny_model))
    with pytest.raises(ValueError, match="actor.backend=dta:d2"):
        engine.create_process_group(ParallelStrategy(tensor_parallel_size=2))
