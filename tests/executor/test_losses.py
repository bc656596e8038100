"""Plain restatements of the losses that AReaL trains with, in fp64.

AReaL's own functions compute in fp32 and are compared through the engine
(tests/engine); here nothing but the executor can differ from the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.models import (
    VOCAB_SIZE,
    gradients,
    relative_error,
    tiny_model,
)

FP64 = 1e-10
BUDGETS = [(3, 0), (16, 24)]
CLIP, CLIP_HIGHER, DUAL_CLIP = 0.2, 0.3, 1.6


@dataclass(frozen=True, slots=True)
class Rows:
    """Data beside the tokens, one tensor per sequence; logprobs of stale policies."""

    tokens: list[list[int]]
    mask: list[Tensor]
    old: list[Tensor]
    prox: list[Tensor]
    teacher: list[Tensor]
    advantages: list[Tensor]

    @property
    def num_loss_tokens(self) -> float:
        return float(sum(m.sum() for m in self.mask))

    @property
    def positions(self) -> list[np.ndarray]:
        return [m.numpy() for m in self.mask]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", torch.float64)


@pytest.fixture(scope="module")
def rows(model):
    rng = np.random.default_rng(5)
    tokens = [s for s in random_batch(rng, 16, 24, VOCAB_SIZE) if len(s) > 2][:12]
    assert len(tokens) == 12 and len({tuple(s) for s in tokens}) > 6
    outputs = oracle.sequence_outputs(model, tokens)
    generator = torch.Generator().manual_seed(5)

    def noise(like: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(like.shape, generator=generator, dtype=like.dtype)

    logprobs = [o.logprobs for o in outputs]
    prox = [lp + noise(lp, 0.4) for lp in logprobs]
    mask = []
    for lp in logprobs:  # a prompt, and now and then a token inside the answer
        learned = torch.rand(lp.shape, generator=generator) < 0.8
        learned[: len(lp) // 3] = False
        learned[-1] = True
        mask.append(learned)
    return Rows(
        tokens,
        mask,
        old=[p + noise(p, 0.3) for p in prox],
        prox=prox,
        teacher=[lp + noise(lp, 1.0) for lp in logprobs],
        advantages=[noise(lp, 1.0) for lp in logprobs],
    )


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()


def clipped(ratio: Tensor, advantages: Tensor, dual: bool = False) -> Tensor:
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP_HIGHER)
    loss = torch.maximum(-advantages * ratio, -advantages * bounded)
    if dual:
        loss = torch.minimum(loss, advantages.sign() * DUAL_CLIP * advantages)
    return loss


# One sequence's part of a sum over loss tokens.


def ppo(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    ratio = (logprobs - rows.old[i]).exp()
    return masked_sum(clipped(ratio, rows.advantages[i], dual=True), rows.mask[i])


def ppo_with_entropy(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    bonus = masked_sum(entropy, rows.mask[i])
    return ppo(rows, i, logprobs, entropy) - 0.01 * bonus


def decoupled(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Rejection of stale tokens: outside the bounds a token does not count."""
    behave = (rows.prox[i] - rows.old[i]).exp()
    kept = rows.mask[i] & (behave >= 0.7) & (behave <= 1.3)
    ratio = (logprobs - rows.prox[i]).exp()
    return masked_sum(clipped(ratio, rows.advantages[i]) * behave, kept)


def rejected_sequences(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """The same by sequence: its geometric mean is bounded, and weighs every token."""
    mask = rows.mask[i]
    behave = ((rows.prox[i] - rows.old[i])[mask].mean()).exp()
    if not 0.9 <= behave <= 1.1:
        return 0.0 * logprobs.sum()
    ratio = (logprobs - rows.prox[i]).exp()
    return masked_sum(clipped(ratio, rows.advantages[i]) * behave, mask)


def gspo(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """One ratio per sequence, the geometric mean over its loss tokens."""
    mask = rows.mask[i]
    ratio = (logprobs - rows.prox[i])[mask].mean().exp()
    advantage = rows.advantages[i][mask].mean()
    return clipped(ratio, advantage) * mask.sum()


def sapo(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Soft gates around a ratio of 1, sharper for negative advantages."""
    advantages, ratio = rows.advantages[i], (logprobs - rows.old[i]).exp()
    temperature = torch.where(advantages > 0, 1.0, 1.05).double()
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return masked_sum(-gate * advantages, rows.mask[i])


def distillation(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Reverse KL to a teacher beside the policy loss."""
    penalty = masked_sum(logprobs - rows.teacher[i], rows.mask[i])
    return 0.7 * ppo(rows, i, logprobs, entropy) + 0.3 * penalty


def pure_distillation(rows: Rows, i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    reward = rows.teacher[i] - logprobs.detach()
    weight = (logprobs - rows.old[i]).exp()
    return -masked_sum(weight * reward, rows.mask[i])


ADDITIVE = [
    ppo,
    ppo_with_entropy,
    decoupled,
    rejected_sequences,
    gspo,
    sapo,
    distillation,
    pure_distillation,
]

# Of the whole batch.


def m2po(rows: Rows, indices: list[int], logprobs: list[Tensor], _: object) -> Tensor:
    """Drops the tokens with the largest second moment until the mean is below it."""
    old = torch.cat([rows.old[i][rows.mask[i]] for i in indices])
    prox = torch.cat([rows.prox[i][rows.mask[i]] for i in indices])
    moment = (old - prox) ** 2
    order = moment.argsort(descending=True)
    tail_means = moment[order].flip(0).cumsum(0).flip(0) / torch.arange(
        len(moment), 0, -1
    )
    num_dropped = int((tail_means < 0.04).nonzero()[0])
    assert 0 < num_dropped < len(moment)
    kept = torch.ones_like(moment, dtype=torch.bool)
    kept[order[:num_dropped]] = False
    lp = torch.cat([x[rows.mask[i]] for i, x in zip(indices, logprobs, strict=True)])
    advantages = torch.cat([rows.advantages[i][rows.mask[i]] for i in indices])
    loss = clipped((lp - prox).exp(), advantages)
    return masked_sum(loss, kept) / kept.sum()


def dpo(rows: Rows, indices: list[int], logprobs: list[Tensor], _: object) -> Tensor:
    """Pairs of neighbours under a log-sigmoid of their log-ratios to a reference."""
    ratios = [
        masked_sum(x - rows.old[i], rows.mask[i])
        for i, x in zip(indices, logprobs, strict=True)
    ]
    margins = torch.stack(ratios[::2]) - torch.stack(ratios[1::2])
    return -torch.nn.functional.logsigmoid(0.3 * margins).mean()


def ipo(rows: Rows, indices: list[int], logprobs: list[Tensor], _: object) -> Tensor:
    means = [
        (x - rows.old[i])[rows.mask[i]].mean()
        for i, x in zip(indices, logprobs, strict=True)
    ]
    margins = torch.stack(means[::2]) - torch.stack(means[1::2])
    return ((margins - 1 / 0.6) ** 2).mean()


def sft(rows: Rows, indices: list[int], logprobs: list[Tensor], _: object) -> Tensor:
    """AReaL's denominator: in parts it would not add up."""
    total = sum(
        masked_sum(x, rows.mask[i]) for i, x in zip(indices, logprobs, strict=True)
    )
    return -total / (1e-5 + rows.num_loss_tokens)


WHOLE = [m2po, dpo, ipo, sft]


def summed(loss: Callable[..., Tensor], rows: Rows) -> Callable[..., Tensor]:
    def group_loss(indices: list[int], *outputs: list[Tensor]) -> Tensor:
        parts = [loss(rows, i, *x) for i, *x in zip(indices, *outputs, strict=True)]
        return torch.stack(parts).sum() / rows.num_loss_tokens

    return group_loss


def whole(loss: Callable[..., Tensor], rows: Rows) -> Callable[..., Tensor]:
    return lambda indices, *outputs: loss(rows, indices, *outputs)


def dense_gradients(model, rows: Rows, group_loss) -> tuple[float, Tensor]:
    """All sequences' graphs alive at once, one loss."""
    outputs = [oracle.sequence_output(model, s) for s in rows.tokens]
    loss = group_loss(
        list(range(len(rows.tokens))),
        [o.logprobs for o in outputs],
        [o.entropy for o in outputs],
    )
    loss.backward()
    return float(loss.detach()), gradients(model)


def assert_exact(executor, rows: Rows, group_loss, scope: str, want) -> None:
    tree = PrefixTree.from_sequences(rows.tokens)
    assert tree.num_tree_tokens < tree.num_sequence_tokens
    positions = rows.positions
    loss = executor.forward_backward_groups(tree, group_loss, positions, scope)
    assert abs(loss - want[0]) <= FP64 * max(1.0, abs(want[0]))
    assert float(want[1].norm()) > 1e-3
    assert relative_error(gradients(executor.model), want[1]) <= FP64


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("loss", ADDITIVE, ids=lambda f: f.__name__)
def test_losses_that_add_up(model, rows, loss, scope):
    group_loss = summed(loss, rows)
    want = dense_gradients(model, rows, group_loss)
    for budgets in BUDGETS:
        executor = TreeExecutor(model, ExecutorConfig(*budgets))
        assert_exact(executor, rows, group_loss, scope, want)


@pytest.mark.parametrize("loss", WHOLE, ids=lambda f: f.__name__)
def test_losses_of_the_whole_batch(model, rows, loss):
    group_loss = whole(loss, rows)
    want = dense_gradients(model, rows, group_loss)
    for budgets in BUDGETS:
        executor = TreeExecutor(model, ExecutorConfig(*budgets))
        assert_exact(executor, rows, group_loss, "batch", want)


def test_the_data_reach_every_branch(model, rows):
    """Tokens clipped above, below and by the dual bound; tokens and sequences
    rejected and kept."""
    outputs = oracle.sequence_outputs(model, rows.tokens)

    def flat(values: list[Tensor]) -> Tensor:
        return torch.cat([v[m] for v, m in zip(values, rows.mask, strict=True)])

    advantages, prox, old = map(flat, (rows.advantages, rows.prox, rows.old))
    ratio = (flat([o.logprobs for o in outputs]) - prox).exp()
    behave = (prox - old).exp()
    stale = (flat([o.logprobs for o in outputs]) - old).exp()
    for branch in (
        (ratio > 1 + CLIP_HIGHER) & (advantages > 0),
        (ratio < 1 - CLIP) & (advantages < 0),
        (ratio - 1).abs() < CLIP,
        (stale > DUAL_CLIP) & (advantages < 0),
        (behave < 0.7) | (behave > 1.3),
        (behave >= 0.7) & (behave <= 1.3),
    ):
        assert branch.any()
    means = torch.stack(
        [
            (p - o)[m].mean().exp()
            for p, o, m in zip(rows.prox, rows.old, rows.mask, strict=True)
        ]
    )
    is_kept = (means >= 0.9) & (means <= 1.1)
    assert 0 < is_kept.sum() < len(means)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_critic_with_clipped_values(value_model, rows, scope):
    """The larger of two squared errors, one of them of a value clipped around the
    old one."""
    masks = [torch.cat([m, torch.tensor([False])]) for m in rows.mask]
    outputs = [oracle.value_output(value_model, s).values for s in rows.tokens]
    old = [v.detach() + 0.2 * torch.cos(7 * v.detach()) for v in outputs]
    targets = [v.detach() + torch.sin(5 * v.detach()) for v in outputs]

    def loss(indices: list[int], values: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, v in zip(indices, values, strict=True):
            near = old[i] + (v - old[i]).clamp(-0.1, 0.1)
            errors = [0.5 * (x - targets[i]) ** 2 for x in (v, near)]
            total = total + masked_sum(torch.maximum(*errors), masks[i])
        return total / rows.num_loss_tokens

    want_loss = loss(list(range(len(outputs))), outputs)
    want_loss.backward()
    want = float(want_loss.detach()), gradients(value_model)
    apart = torch.cat([(v - o)[m] for v, o, m in zip(outputs, old, masks, strict=True)])
    assert 0 < int((apart.abs() > 0.1).sum()) < len(apart)
    tree = PrefixTree.from_sequences(rows.tokens)
    positions = [m.numpy() for m in masks]
    for budgets in BUDGETS:
        executor = TreeExecutor(value_model, ExecutorConfig(*budgets), "values")
        got = executor.forward_backward_groups(tree, loss, positions, scope)
        assert abs(got - want[0]) <= FP64
        assert relative_error(gradients(value_model), want[1]) <= FP64


def test_reward_model(value_model, rows):
    """Pairs of neighbours, each scored at its last token."""
    positions = [np.arange(len(s)) == len(s) - 1 for s in rows.tokens]

    def loss(indices: list[int], values: list[Tensor]) -> Tensor:
        scores = torch.stack([v[-1] for v in values])
        return -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2]).mean()

    outputs = [oracle.value_output(value_model, s).values for s in rows.tokens]
    want_loss = loss([], outputs)
    want_loss.backward()
    want = float(want_loss.detach()), gradients(value_model)
    tree = PrefixTree.from_sequences(rows.tokens)
    for budgets in BUDGETS:
        executor = TreeExecutor(value_model, ExecutorConfig(*budgets), "values")
        got = executor.forward_backward_groups(tree, loss, positions, "batch")
        assert abs(got - want[0]) <= FP64
        assert relative_error(gradients(value_model), want[1]) <= FP64
        assert executor.last_stats.num_rows <= len(rows.tokens)


@pytest.mark.parametrize(
    "loss, scope", [(decoupled, "sequence"), (m2po, "batch")], ids=["decoupled", "m2po"]
)
def test_ten_steps_in_a_row(rows, loss, scope):
    """Each step of SGD starts from weights that are still equal."""
    dense, ours = (tiny_model("qwen3", torch.float64) for _ in range(2))
    group_loss = (whole if loss in WHOLE else summed)(loss, rows)
    tree = PrefixTree.from_sequences(rows.tokens)
    executor = TreeExecutor(ours, ExecutorConfig(block_tokens=16, retain_tokens=24))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (dense, ours)]
    losses = []
    for _ in range(10):
        outputs = [oracle.sequence_output(dense, s) for s in rows.tokens]
        want = group_loss(
            list(range(len(outputs))),
            [o.logprobs for o in outputs],
            [o.entropy for o in outputs],
        )
        want.backward()
        got = executor.forward_backward_groups(tree, group_loss, rows.positions, scope)
        assert abs(got - float(want.detach())) <= FP64
        losses.append(got)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for a, b in zip(ours.parameters(), dense.parameters(), strict=True):
            assert relative_error(a.detach(), b.detach()) <= FP64
    assert losses[-1] < losses[0] - 1e-3
