"""Updates with the routers' auxiliary loss against AReaL's engine, row by row."""

import json

import pytest
from areal.api.cli_args import MicroBatchSpec
from areal.engine.fsdp_engine import FSDPPPOActor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import DTAPPOActor
from areal_dta.engine.setting_checks import router_aux_loss
from areal_dta.executor.routers import is_router
from tests.engine.builders import (
    actor_config,
    build_engine,
    grpo_batch,
    one_sequence_each,
    relative_error,
    save_tiny_moe,
)
from tests.engine.checks import assert_same_update, grpo_loss, train_once

COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("moe"))


def tree(model, coefficient, **overrides):
    dta = DTAOptions(block_tokens=6, retain_tokens=9, router_aux_loss=coefficient)
    config = DTAPPOActorConfig(**vars(actor_config(model, **overrides)), dta=dta)
    return build_engine(DTAPPOActor, config)


def update_of_areal(model, batch):
    """AReaL's update with one sequence per micro-batch, whose loss is AReaL's plus
    that of Transformers on what the routers gave for the sequence."""
    spec = one_sequence_each(len(batch["input_ids"]))
    engine = build_engine(FSDPPPOActor, actor_config(model, mb_spec=spec))
    routers = [m for m in engine.model.modules() if is_router(m)]
    given = {}
    for index, router in enumerate(routers):
        router.register_forward_hook(
            lambda module, args, output, index=index: given.update({index: output[0]})
        )
    plain, values = grpo_loss(), []

    def loss(logprobs, entropy, mb_input, **options):
        num_tokens = len(mb_input["input_ids"].flatten())
        logits = tuple(given[i][:num_tokens] for i in range(len(routers)))
        aux = load_balancing_loss_func(logits, routers[0].num_experts, routers[0].top_k)
        values.append(float(aux.detach()) * float(mb_input["loss_mask"].sum()))
        return plain(logprobs, entropy, mb_input, **options) + COEFFICIENT * aux

    result = train_once(engine, batch, loss)
    return result, sum(values) / float(batch["loss_mask"].sum())


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "overrides", [{}, {"mb_spec": MicroBatchSpec(n_mbs=2)}], ids=["one", "two"]
)
def test_an_update_equals_areal_s_row_by_row(moe, overrides):
    batch = grpo_batch()
    expected, aux_loss = update_of_areal(moe, batch)
    actual = train_once(tree(moe, COEFFICIENT, **overrides), batch)
    assert_same_update(actual, expected)
    assert actual["stats"]["dta/router_aux_loss"] == pytest.approx(aux_loss, rel=1e-5)
    without = train_once(tree(moe, 0.0), batch)
    assert relative_error(without["gradients"], expected["gradients"]) > 0.01
    assert "dta/router_aux_loss" not in without["stats"]


def test_the_configuration_of_the_model_decides_under_auto(moe, tmp_path):
    from transformers import AutoConfig

    config = actor_config(moe)
    config.dta = DTAOptions(router_aux_loss="auto")
    hf_config = AutoConfig.from_pretrained(moe)
    assert router_aux_loss(config, hf_config) == (0.0, [])
    stored = json.loads((moe / "config.json").read_text())
    stored |= {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    hf_config = AutoConfig.from_pretrained(tmp_path)
    assert router_aux_loss(config, hf_config) == (0.02, [])
    # asked for, and not trained: as in AReaL, but not silently
    config.dta = DTAOptions()
    coefficient, messages = router_aux_loss(config, hf_config)
    assert coefficient == 0
    assert "dta.router_aux_loss=auto adds it" in messages[0]
    # a reference trains nothing
    config.optimizer = None
    assert router_aux_loss(config, hf_config) == (0.0, [])


@pytest.mark.parametrize("value", [-0.1, float("nan"), True, "always"])
def test_a_coefficient_out_of_range(value):
    with pytest.raises(ValueError, match=r"dta\.router_aux_loss=.* number >= 0"):
        DTAOptions(router_aux_loss=value)
