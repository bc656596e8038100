"""Every causal decoder type of Transformers: exact, or refused by name.

The slow test takes some minutes; the quick one holds a dozen types that differ in what
they ask of attention, positions and layers.
"""

from pathlib import Path

import pytest
import transformers

from tests.executor.model_sweep import (
    BLOCK_TOKENS,
    CASES,
    MODEL_TYPES,
    WINDOW,
    Case,
    build,
    judge,
    sweep_batch,
)
from tests.executor.model_table import read_table

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
QUICK = (
    "afmoe",
    "bart",
    "deepseek_v3",
    "falcon_mamba",
    "gemma2",
    "gpt_oss",
    "gpt2 (inverse layer scale)",
    "llama (dynamic rope)",
    "llama",
    "ministral3 (llama 4 scaling)",
    "mixtral (router jitter)",
    "mistral",
    "qwen2_moe (window)",
    "roberta",
)
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    return read_table(TABLE.read_text())


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("name", QUICK)
def test_a_type_is_exact_or_refused_as_the_table_says(name, table):
    verdict = judge(BY_NAME[name])
    assert verdict.kind in ("exact", "refused"), f"{verdict.reason}\n{verdict.trace}"
    assert table[name] == verdict.kind, verdict.reason


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_type_is_exact_or_refused(table):
    verdicts = [judge(case) for case in CASES]
    faults = {v.case.name: v.reason for v in verdicts if v.kind in ("wrong", "crashed")}
    assert not faults
    if f"Transformers {transformers.__version__} " in TABLE.read_text():
        assert {verdict.case.name: verdict.kind for verdict in verdicts} == table


def test_the_table_lists_every_type_of_its_version(table):
    assert set(table.values()) <= {"exact", "refused", "not built"}
    exact = {BY_NAME[n].model_type for n, k in table.items() if k == "exact"}
    assert len(exact) >= 60
    if f"Transformers {transformers.__version__} " in TABLE.read_text():
        assert set(table) == set(BY_NAME)


def test_every_type_of_transformers_is_a_case():
    plain = {case.model_type for case in CASES if not case.options}
    assert plain == set(MODEL_TYPES)


def test_the_batch_passes_the_window_and_both_block_sizes_cut_it():
    batch = sweep_batch()
    assert max(map(len, batch)) > 4 * WINDOW
    assert min(BLOCK_TOKENS) < WINDOW < max(map(len, batch)) < max(BLOCK_TOKENS)
    assert max(map(max, batch)) < 64  # the smallest vocabulary of the cases


def test_a_difference_is_found():
    def build_with_mixing(case: Case):
        """Let each token read its neighbour in the call, not on its path."""
        model = build(case)
        model.model.layers[3].mlp.register_forward_hook(
            lambda module, args, out: out + 1e-2 * out.roll(1, dims=1)
        )
        return model

    verdict = judge(Case("llama"), build_with_mixing)
    assert verdict.kind == "wrong" and "logprobs" in verdict.reason
