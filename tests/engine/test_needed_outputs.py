"""AReaL's own losses are given the outputs that they read; others, all."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from areal.trainer.ppo.actor import grpo_loss_fn

from areal_dta.engine.batch import Alignment, OutputRule, load_batch, needed_outputs
from tests.engine.builders import actor_config, gradients, grpo_batch, relative_error
from tests.engine.two_rank_data import trajectories
from tests.engine.two_rank_updates import tree_engine


def total_logprob(logprobs, entropy, mb_input, **kwargs):
    return (logprobs * mb_input["loss_mask"]).sum()


def everything(logprobs, entropy, mb_input, **kwargs):
    return logprobs.sum()


def count_tokens(mb_input):
    return mb_input["loss_mask"].count_nonzero()


def test_both_alignments_name_the_same_outputs(tiny_model):
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 0, 0]])
    rows = {
        "input_ids": torch.arange(10).reshape(2, 5) + 1,
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
    }
    spec = actor_config(tiny_model).mb_spec
    by_token = load_batch(rows | {"loss_mask": mask}, spec)
    by_output = load_batch(rows | {"loss_mask": mask.roll(-1, -1)}, spec)
    expected = [[False, True, True], [True, True]]
    for batch, alignment in (
        (by_token, Alignment.TOKEN),
        (by_output, Alignment.OUTPUT),
    ):
        rule = OutputRule(alignment)
        found = needed_outputs(batch, [0, 1], rule, is_critic=False)
        assert [m.tolist() for m in found] == expected
        values = needed_outputs(batch, [0, 1], rule, is_critic=True)
        assert [m.tolist() for m in values] == [[*m, False] for m in expected]
        rule = OutputRule(alignment, last=True)
        values = needed_outputs(batch, [0, 1], rule, is_critic=True)
        assert [m.tolist() for m in values] == [[*m, True] for m in expected]
    without = load_batch(rows, spec)
    rule = OutputRule(Alignment.TOKEN)
    assert needed_outputs(without, [0, 1], rule, is_critic=False) is None
    last = needed_outputs(without, [1], OutputRule(None, last=True), is_critic=True)
    assert [m.tolist() for m in last] == [[False, False, True]]


@pytest.mark.usefixtures("world")
def test_only_loss_positions_are_projected(tiny_model):
    engine = tree_engine(tiny_model)
    batch = grpo_batch()
    update = functools.partial(
        grpo_loss_fn,
        eps_clip=0.2,
        eps_clip_higher=None,
        c_clip=None,
        use_decoupled_loss=True,
    )
    engine.train_batch(batch, update, count_tokens)
    stats = engine.runner.executor.last_stats
    num_masked = int(batch["loss_mask"].sum())
    assert 0 < stats.num_rows <= num_masked < stats.num_sequence_tokens
    engine.train_batch(batch, total_logprob, count_tokens)
    assert engine.runner.executor.last_stats.num_rows > stats.num_rows


@pytest.mark.usefixtures("world")
def test_compute_logp_equals_a_full_forward_where_the_mask_is_set(tiny_model):
    engine = tree_engine(tiny_model)
    items = trajectories()
    few = engine.compute_logp([dict(item) for item in items])
    num_rows = engine.runner.executor.last_stats.num_rows
    everywhere = engine.forward_batch(items)
    assert engine.runner.executor.last_stats.num_rows > num_rows
    for item, got, want in zip(items, few, everywhere, strict=True):
        mask = item["loss_mask"].roll(-1, -1).bool()
        torch.testing.assert_close(got[mask], want[mask], rtol=1e-5, atol=1e-6)
        assert (got[~mask] == 0).all() and mask.any()


@pytest.mark.usefixtures("world")
def test_positions_all_is_honoured_and_changes_nothing(tiny_model):
    found = {}
    for choice in ("auto", "all"):
        engine = tree_engine(tiny_model)
        engine.config.dta = SimpleNamespace(positions=choice)
        update = functools.partial(
            grpo_loss_fn, eps_clip=0.2, eps_clip_higher=None, c_clip=None
        )
        engine.train_batch(grpo_batch(), update, count_tokens)
        found[choice] = gradients(engine), engine.runner.executor.last_stats.num_rows
    assert relative_error(found["auto"][0], found["all"][0]) < 1e-5
    assert found["auto"][1] < found["all"][1]


def test_masks_have_one_entry_an_output(tiny_model):
    batch = load_batch(grpo_batch(), actor_config(tiny_model).mb_spec)
    masks = needed_outputs(batch, [0, 1], OutputRule(Alignment.OUTPUT), is_critic=False)
    assert [len(m) for m in masks] == [n - 1 for n in batch.lengths[:2]]
    assert all(m.dtype == np.bool_ for m in masks)
