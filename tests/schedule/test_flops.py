from types import SimpleNamespace

import pytest

from areal_dta.schedule import FlopModel, build_schedule
from areal_dta.schedule.decoder_sizes import DecoderSizes
from areal_dta.tree import PrefixTree
from tests.builders import every_token, make_tree
from tests.models import ARCHITECTURES, HYBRIDS, tiny_model

SHAPE = SimpleNamespace(
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=3,
    intermediate_size=10,
    vocab_size=50,
)


def test_terms_by_hand():
    model = FlopModel.from_config(SHAPE)
    # q and o: 8 x 12 each, k and v: 8 x 6 each, gate, up, down: 8 x 10 each
    assert model.per_token == 2 * 2 * (2 * 96 + 2 * 48 + 3 * 80)
    assert model.per_pair == 2 * (2 * 4 * 3 + 2 * 4 * 3)
    assert model.per_output == 2 * 8 * 50


def test_moe_counts_active_experts_and_the_router():
    moe = SimpleNamespace(
        **vars(SHAPE), num_experts=16, num_experts_per_tok=2, moe_intermediate_size=5
    )
    dense_mlp, moe_mlp = 3 * 8 * 10, 3 * 8 * 5 * 2 + 8 * 16
    difference = FlopModel.from_config(moe).per_token - (
        FlopModel.from_config(SHAPE).per_token
    )
    assert difference == 2 * 2 * (moe_mlp - dense_mlp)


def test_dense_and_tree_by_hand():
    model = FlopModel(per_token=100, per_pair=10, per_output=1)
    tree = make_tree("abc", "abd")
    dense = 6 * 100 + 2 * 6 * 10 + 6
    everything = 4 * 100 + (1 + 2 + 3 + 3) * 10 + 4
    # nothing is read at a leaf's last token
    shared = 2 * 100 + (1 + 2) * 10 + 2
    assert model.dense([3, 3], training=False) == dense
    assert model.tree(tree, False, every_token(tree)) == everything
    assert model.tree(tree, training=False) == shared
    assert model.tree(tree) == 3 * shared


def test_schedule_adds_recomputation_only():
    model = FlopModel.from_config(SHAPE)
    tree = make_tree("abcdefgh", "abcdxyzw")
    kept = build_schedule(tree, 3, None)
    assert model.schedule(kept) == model.tree(tree)
    dense = model.dense(map(tree.sequence_length, range(tree.num_sequences)))
    assert model.saving(tree, kept) == dense / model.tree(tree)
    again = build_schedule(tree, 3, 0)
    assert model.schedule(again) > model.tree(tree)


def test_no_sharing_saves_nothing_and_empty_is_one():
    model = FlopModel.from_config(SHAPE)
    alone = make_tree("abc", "xyz")
    lengths = map(alone.sequence_length, range(alone.num_sequences))
    assert model.dense(lengths) == model.tree(alone, needed=every_token(alone))
    empty = PrefixTree()
    assert model.tree(empty) == 0 and 1.0 == model.saving(empty, build_schedule(empty))


def test_a_config_without_sizes_is_named():
    with pytest.raises(ValueError, match="SimpleNamespace has no `hidden_size`"):
        FlopModel.from_config(SimpleNamespace())


@pytest.mark.parametrize("name", [*ARCHITECTURES, *HYBRIDS])
def test_products_are_those_of_the_parameters(name):
    """Every matrix once per token, experts as often as they are active."""
    model = tiny_model(name)
    config, products = model.config, 0.0
    for path, parameter in model.named_parameters():
        if parameter.dim() < 2 or "embed" in path or "lm_head" in path:
            continue
        is_expert = parameter.dim() == 3 and "conv" not in path
        share = config.num_experts_per_tok / len(parameter) if is_expert else 1
        products += share * parameter.numel()
    sizes = DecoderSizes.from_config(config)
    flops = FlopModel.from_config(config)
    assert flops.per_token == 2 * (products + sizes.scan_products)
    assert flops.mlp_per_token < flops.per_token
    has_scan = any("A_log" in path for path, _ in model.named_parameters())
    assert has_scan == (sizes.scan_products > 0) == (flops.scan_per_token > 0)


def test_scans_by_hand():
    def scan(name):
        return DecoderSizes.from_config(tiny_model(name).config).scan_products

    # 4 heads of 8 x 8, read twice and written once, in 3 layers
    assert scan("qwen3_5_text") == 3 * 3 * 4 * 8 * 8
    # 8 heads of 8 x 8, written and read once; 2 of 3 layers, and both of 2
    assert scan("bamba") == scan("falcon_h1") == 2 * 2 * 8 * 8 * 8


def test_layers_that_carry_a_state_attend_to_no_pairs():
    def pairs(name):
        return FlopModel.from_config(tiny_model(name).config).per_pair

    one_layer = 4 * 4 * 8
    assert pairs("mamba2") == 0
    assert pairs("bamba") == pairs("nemotron_h") == pairs("lfm2") == one_layer
    assert pairs("falcon_h1") == 2 * one_layer


def test_mamba2_needs_no_sizes_of_attention():
    config = tiny_model("mamba2").config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        delattr(config, name)
    assert FlopModel.from_config(config).per_token > 0
