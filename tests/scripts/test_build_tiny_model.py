"""The build script, end to end, with a few steps."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts/build_tiny_model.py"


@pytest.fixture
def build(monkeypatch):
    spec = importlib.util.spec_from_file_location("build_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module.main
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_quick_build_is_complete_and_reproducible(build, tmp_path, capsys):
    for name in "ab":
        build(["--quick", "--seed", "3", "--out", str(tmp_path / name)])
    assert "| plain |" in capsys.readouterr().out
    assert contents(tmp_path / "a") == contents(tmp_path / "b")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.float32
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model.config.vocab_size == len(tokenizer)
