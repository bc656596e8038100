"""Layers with a state on two ranks, gathered per step and per block, in fp64.

Each parameter's gradient, and each logprob, is that of one process which runs one
sequence at a time; a rank with an empty tree waits for nobody.
"""

import functools

import pytest

from areal_dta.executor import oracle
from tests.engine import hybrid_scenarios as scenarios
from tests.engine.gather_layer_scenarios import full_batch, loss_of
from tests.engine.ranks import run_ranks
from tests.models import relative_error

TOLERANCE = 1e-10
QUICK = [" ".join(key) for key in scenarios.QUICK_KEYS]


@functools.cache
def dense(name):
    """Loss, gradients and logprobs of all rows, one sequence at a time."""
    model, batch = scenarios.hybrid(name), full_batch()
    outputs = oracle.sequence_outputs(model, batch)
    loss = oracle.forward_backward(model, batch, loss_of(list(range(len(batch)))))
    grads = {n: p.grad for n, p in model.named_parameters()}
    return loss, grads, [x.logprobs for x in outputs]


def check(ranks, key):
    loss, want, logprobs = dense(key.split()[0])
    results = [rank[key] for rank in ranks]
    assert sum(x["loss"] for x in results) == pytest.approx(loss, rel=TOLERANCE)
    for result in results:
        assert result["gradients"].keys() == want.keys()
        for name, expected in want.items():
            got = result["gradients"][name] * len(ranks)  # FSDP averages
            if expected is None:  # an expert that no token reaches
                assert not got.any(), (key, name)
            else:
                assert relative_error(got, expected) <= TOLERANCE, (key, name)
    seen = [row for result in results for row in result["logprobs"]]
    assert sorted(seen) == list(range(len(logprobs)))
    for result in results:
        for row, got in result["logprobs"].items():
            assert relative_error(got, logprobs[row]) <= TOLERANCE, (key, row)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run_ranks(scenarios.run_quick, [2], tmp_path_factory.mktemp("hybrids"))[2]


@pytest.mark.parametrize("key", QUICK)
def test_gathered_per_step(quick, key):
    check(quick, key)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", scenarios.FAMILIES)
def test_every_kind_with_every_budget(family, tmp_path):
    ranks = run_ranks(getattr(scenarios, f"run_{family}"), [2], tmp_path)[2]
    for key in scenarios.sweep_keys(family):
        check(ranks, " ".join(key))
