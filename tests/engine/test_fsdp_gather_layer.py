"""Ranks in step, parameters resharded around every block: one result, no waiting."""

import pytest
import torch

from areal_dta.executor import oracle
from tests.engine.gather_layer_scenarios import (
    BUDGETS,
    MODELS,
    build_model,
    full_batch,
    loss_of,
    rows_of_rank,
    run_all,
)
from tests.engine.ranks import run_ranks

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
SCENARIOS = [
    f"{name}-{split}-{budgets}"
    for split in ("uneven", "empty", "first_empty")
    for name in MODELS
    for budgets in BUDGETS
    if name == "untied" or budgets == "some"
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return run_ranks(run_all, [1, 2], tmp_path_factory.mktemp("gather_layer"))


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request, worlds):
    return worlds[request.param]


@pytest.fixture(scope="module")
def dense():
    """Gradients of the sum over all rows, one sequence at a time."""
    found = {}
    for name in MODELS:
        model, batch = build_model(name), full_batch()
        value = oracle.forward_backward(model, batch, loss_of(list(range(99))))
        grads = {n: p.grad for n, p in model.named_parameters()}
        found[name] = (value, grads)
    return found


def assert_gradients(actual, expected, scale):
    """``scale``: FSDP averages over the ranks."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name] / scale - want).norm() / want.norm().clamp_min(1e-12)
        assert error <= TOLERANCES[want.dtype], (name, float(error))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_are_those_of_all_rows(ranks, dense, scenario):
    value, grads = dense[scenario.split("-")[0]]
    for results in ranks:
        assert_gradients(results[scenario]["gradients"], grads, 1 / len(ranks))
    total = sum(results[scenario]["loss"] for results in ranks)
    assert total == pytest.approx(value, rel=1e-5, abs=2e-4)  # it is a sum


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_layers_at_most_are_gathered(ranks, scenario):
    """The last one, up front for a backward, and the one in work; of four."""
    for results in ranks:
        assert 1 <= results[scenario]["gathered"] <= 2


def test_batch_scope(ranks, dense):
    for results in ranks:
        grads = results["batch_scope"]["gradients"]
        assert_gradients(grads, dense["untied"][1], 1 / len(ranks))


def test_gradients_of_two_traversals_add_up(ranks, dense):
    for results in ranks:
        grads = results["twice"]["gradients"]
        assert_gradients(grads, dense["tied"][1], 2 / len(ranks))


def test_forward_only(ranks):
    expected = oracle.sequence_outputs(build_model("untied"), full_batch())
    for rank, results in enumerate(ranks):
        for split, outputs in zip(("uneven", "empty"), results["forward"], strict=True):
            rows = rows_of_rank(split, rank, len(ranks))
            assert len(outputs) == len(rows)
            for row, got in zip(rows, outputs, strict=True):
                torch.testing.assert_close(got, expected[row].logprobs)


def test_a_failing_rank_tells_the_others_and_all_go_on(ranks, dense):
    *others, last = [results["failing_loss"] for results in ranks]
    assert last["error"] == "ArithmeticError: no loss today"
    for results in others:
        assert results["error"].startswith("PeerFailure: 1 of 2 ranks failed")
    for results in (*others, last):
        assert_gradients(results["gradients"], dense["untied"][1], 1 / len(ranks))
