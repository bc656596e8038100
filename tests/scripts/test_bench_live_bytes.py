"""Counted bytes: what they follow, and what they leave out."""

import pytest
import torch
from bench.measure import Bench, LiveBytes, peak_bytes
from bench.models import build_model
from bench.variants import make_variant
from bench.workloads import Sizes

from tests.scripts.works import CPU, work_of


@pytest.fixture(scope="module")
def model():
    return build_model("tiny", torch.float32, CPU, seed=0)


def test_live_bytes_follow_the_graph():
    x = torch.randn(1000, requires_grad=True)
    with LiveBytes([x]) as counter:
        y = x.exp()  # kept by itself and by its own backward
        view = y[10:].view(-1)
        assert counter.live == 4000
        z = y.exp()
        del y, view
        assert counter.live == 8000
        total = z.sum()
        del z
        assert counter.live == 8004
        total.backward()  # leaves x.grad alone
        del total
        assert counter.live == 4000
    assert counter.peak >= 12000


def test_live_bytes_leave_out_what_was_there():
    x = torch.zeros(1000)
    with LiveBytes([x]) as counter:
        x.add_(1.0)
        x[5:].mul_(2.0)
    assert counter.peak == 0


def test_peak_leaves_out_parameter_gradients():
    layer = torch.nn.Linear(100, 100, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    peak = peak_bytes(lambda: layer(torch.ones(1, 100)).sum().backward(), layer)
    assert 40_000 <= peak < 60_000  # the new gradient, before it is added


def test_recomputing_costs_less_memory_than_one_block(model):
    work = work_of("tau2-airline", Sizes(vocab_size=512, path_tokens=400))
    names = ["dense", "packed", "dta@64/0"]
    bench = Bench(model, [make_variant(name, model, {}) for name in names])
    _, packed, dta = bench.measure(work, repeats=1)
    assert packed.peak_bytes is not None and dta.peak_bytes is not None
    assert dta.peak_bytes < 0.5 * packed.peak_bytes
