"""The options of the tree engine, from the configuration to the trainer's decisions."""

import pytest
from omegaconf import OmegaConf

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_tokens": 0}, "dta.block_tokens=0"),
        ({"block_tokens": "atuo"}, "dta.block_tokens=atuo"),
        ({"block_tokens": None}, "dta.block_tokens=None"),
        ({"retain_tokens": -1}, "dta.retain_tokens=-1"),
        ({"positions": "some"}, "dta.positions=some; expected auto or all"),
        ({"loss_scope": "token"}, "expected auto or sequence or batch"),
        ({"fuse_prox_logp": "true"}, "dta.fuse_prox_logp=true"),
        ({"reshard": "layer"}, "dta.reshard=layer; expected auto or step or block"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        DTAOptions(**values)


def test_values_of_a_yaml_file():
    schema = OmegaConf.structured(DTAOptions)
    yaml = "{block_tokens: auto, retain_tokens: 4096, fuse_prox_logp: false}"
    options = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.create(yaml)))
    assert options == DTAOptions("auto", 4096, fuse_prox_logp="false")
    assert OmegaConf.merge(schema, {"block_tokens": 64}).block_tokens == 64


def actor(engine: str, **options) -> DTAPPOActorConfig:
    values = {"backend": "fsdp:d1", "ppo_n_minibatches": 1} | options
    return DTAPPOActorConfig(engine=engine, use_decoupled_loss=True, **values)


def test_the_forward_pass_for_proximal_logprobs_is_skipped_where_it_is_exact():
    assert not actor("dta").should_compute_prox_logp()
    assert actor("fsdp").should_compute_prox_logp()
    assert actor("dta", ppo_n_minibatches=2).should_compute_prox_logp()
    kept = actor("dta", dta=DTAOptions(fuse_prox_logp="false"))
    assert kept.should_compute_prox_logp()
