"""The whole command on this machine, and that it notices what is wrong."""

import io
import json

import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config

from areal_dta.doctor import parity, timing
from areal_dta.doctor.__main__ import main
from areal_dta.doctor.choice import model_choice
from areal_dta.doctor.machine import Finding, inspect_machine
from areal_dta.doctor.report import Printer
from areal_dta.executor.kernels import KERNELS
from areal_dta.executor.kernels.flash_cpu import FlashCpuKernel


@pytest.fixture
def qwen3_8b(tmp_path) -> str:
    """A folder with the configuration of Qwen3-8B, and no weights."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_command(tmp_path, monkeypatch, capsys, qwen3_8b):
    monkeypatch.setattr(timing, "BLOCK_TOKENS", (32, 64))
    file = tmp_path / "found" / "doctor.json"
    arguments = ["--device", "cpu", "--model", qwen3_8b, "--seconds", "5"]
    status = main([*arguments, "--json", str(file)])
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert status == (1 if found["problems"] else 0)
    assert not any("error" in text for text in found["problems"]), found["problems"]
    # Every kernel is listed, and those for CPUs ran.
    errors = {(p["name"], p["dtype"]): p["error"] for p in found["parity"]}
    assert {name for name, _ in errors} >= {*KERNELS, "Qwen3", "Mistral, window of 64"}
    assert errors["flash_cpu", "float32"] < 1e-5
    assert errors["Qwen3", "float32"] < 1e-5
    assert [b["num_tokens"] for b in found["blocks"]] == [32, 64]
    assert all(b["seconds"] > 0 for b in found["blocks"])
    assert found["model"]["num_parameters"] == pytest.approx(8.19e9, rel=0.01)
    # Sentences may be longer than a table.
    tables = [line for line in printed.splitlines() if line[:5] not in ("note:",)]
    assert max(map(len, tables)) <= 80
    assert "Ready" in printed or "Not ready" in printed


class Wrong(FlashCpuKernel):
    """One part of the gradient is lost."""

    def backward(self, grad_out, q, out, lse, term):
        grad_q, grad_k, grad_v = super().backward(grad_out, q, out, lse, term)
        grad_k[:, :, :3] = 0
        return grad_q, grad_k, grad_v


class Broken(FlashCpuKernel):
    def forward(self, q, term):
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("kernel", "words"), [(Wrong(), "error"), (Broken(), "no kernel image")]
)
def test_a_kernel_that_is_wrong_is_found(monkeypatch, kernel, words):
    monkeypatch.setitem(KERNELS, "flash_cpu", kernel)
    monkeypatch.setattr(parity, "_HEADS", parity._HEADS[:1])
    by_kernel = {
        check.name: check
        for check in parity.check_kernels("cpu")
        if check.dtype == "float32"
    }
    assert words in by_kernel["flash_cpu"].failure
    assert not by_kernel["masked_softmax"].failure


def test_auto_for_a_named_model(qwen3_8b):
    choice = model_choice(qwen3_8b, inspect_machine())
    assert choice.architecture == "Qwen3ForCausalLM"
    if torch.cuda.is_available():
        return
    by_place = {(c.card, c.ranks, c.path_tokens): c for c in choice.chosen}
    for card in ("H100 80 GB", "H200 141 GB"):
        for path_tokens in (8192, 16384, 32768):
            chosen = by_place[card, 8, path_tokens]
            assert chosen.block_tokens >= 512
            assert chosen.fits == (chosen.predicted_bytes <= chosen.usable_bytes)
    # One card of 80 GB has no room for 8 B parameters with gradients and Adam.
    alone = by_place["H100 80 GB", 1, 8192]
    assert not alone.fits
    eight = by_place["H200 141 GB", 8, 16384]
    assert eight.fits and eight.block_tokens >= 2048


def test_a_model_that_cannot_be_read_or_split(tmp_path):
    machine = inspect_machine()
    missing = model_choice(str(tmp_path / "nowhere"), machine)
    assert missing.findings[0].is_problem
    assert "configuration cannot be read" in missing.findings[0].text
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    Qwen3Config(num_hidden_layers=2, rope_parameters=rope).save_pretrained(tmp_path)
    refused = model_choice(str(tmp_path), machine)
    assert refused.findings[0].is_problem
    assert "prefix trees" in refused.findings[0].text


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch):
    monkeypatch.setattr(timing, "BLOCK_TOKENS", (16, 32))
    monkeypatch.setattr(timing, "_seconds_of_block", lambda *arguments: 10.0)
    first, second = timing.time_blocks("cpu", 30.0)
    assert first.seconds == 10.0
    assert second.seconds is None and "40 s" in second.note


def test_the_verdict_names_the_problems():
    text = io.StringIO()
    printer = Printer(Console(file=text, width=200))
    machine = inspect_machine()
    printer.verdict([Finding(True, "this [bad] thing")], machine, "cpu")
    assert "wrong: this [bad] thing" in text.getvalue()
    assert "Not ready: 1 problem" in text.getvalue()
    printer.verdict([Finding(False, "that")], machine, "cpu")
    assert "Ready: prefix trees on this CPU" in text.getvalue()
