"""``auto`` takes the fastest kernel that is right, the same on all ranks."""

import pytest
import torch

from areal_dta.executor.attention import LayerAttention
from areal_dta.executor.kernels import KERNELS, selection
from areal_dta.executor.kernels.masked_softmax import MaskedSoftmaxKernel
from areal_dta.executor.kernels.selection import BlockSizes, choose_kernel

SIZES = BlockSizes(4, 2, 16, block_tokens=20, path_tokens=30)
LAYERS = [LayerAttention((), window, 0.3, None) for window in (None, 25, None)]


class Right(MaskedSoftmaxKernel):
    name = "right"


class Wrong(MaskedSoftmaxKernel):
    """Forgets what the path receives."""

    name = "wrong"

    def backward(self, grad_out, q, out, lse, term):
        grad_q, grad_k, grad_v = super().backward(grad_out, q, out, lse, term)
        is_path = term.mask.shape is None and term.mask.matrix is None
        return grad_q, grad_k * (0 if is_path else 1), grad_v


class Broken(MaskedSoftmaxKernel):
    name = "broken"

    def forward(self, q, term):
        raise RuntimeError("no kernel image is available")


@pytest.fixture
def choose(monkeypatch):
    """Choose between substitutes that take so many seconds a layer."""

    def run(seconds, gather=lambda found: [found]):
        for kernel in (Right(), Wrong(), Broken()):
            monkeypatch.setitem(KERNELS, kernel.name, kernel)
        monkeypatch.setattr(selection, "CANDIDATES", tuple(seconds))
        timed = []

        def measure(trial, name, layer):
            timed.append((name, layer.window, trial.num_path, trial.shape.num_tokens))
            return seconds[name]

        cpu, dtype = torch.device("cpu"), torch.bfloat16
        chosen = choose_kernel(SIZES, LAYERS, cpu, dtype, gather, measure)
        return *chosen, timed

    return run


def test_the_faster_one_is_taken(choose):
    name, line, timed = choose({"auto": 3.0, "right": 1.0})
    assert name == "right"
    assert line == (
        "attention kernel: right (20 tokens behind 30, forward + backward: "
        "auto 6000.00 ms, right 2000.00 ms)"
    )
    # Each kind of layer once, on a block of the run's own shape.
    assert timed == [(n, w, 30, 20) for n in ("auto", "right") for w in (None, 25)]
    assert choose({"auto": 1.0, "right": 3.0})[0] == "auto"
    assert choose({"auto": 1.0, "right": 1.0})[0] == "auto"


def test_a_wrong_one_is_not_timed(choose):
    name, line, timed = choose({"auto": 3.0, "wrong": 1.0})
    assert name == "auto" and {t[0] for t in timed} == {"auto"}
    assert "wrong wrong by" in line


def test_one_that_does_not_run_is_not_taken(choose):
    name, line, _ = choose({"auto": 3.0, "broken": 1.0})
    assert name == "auto"
    assert "broken RuntimeError: ['no kernel image is available']" in line


def test_all_ranks_take_the_same(choose):
    """Right on all, and as fast as on the slowest rank."""
    here = {"auto": 3.0, "right": 1.0}
    for other, expected in [
        ({"auto": 3.0, "right": 2.0}, "right"),
        ({"auto": 3.0, "right": 7.0}, "auto"),
        ({"auto": 3.0, "right": None}, "auto"),
        ({"auto": None, "right": 9.0}, "right"),
        ({"auto": None, "right": None}, "masked_softmax"),
    ]:
        got = choose(here, lambda found, other=other: [found, other])[0]
        assert got == expected


def test_the_clock_runs(choose):
    trial = selection._Trial(SIZES, ([5], [-1]), 7, torch.device("cpu"), torch.float32)
    assert selection.seconds_of(trial, "masked_softmax", LAYERS[0]) > 0
    assert selection.largest_error(trial, "auto", LAYERS[0]) < selection.TOLERANCE
