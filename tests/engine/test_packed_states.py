"""The dense twin keeps the states of packed sequences apart."""

import pytest

from areal_dta.engine import DensePPOActor
from areal_dta.executor.checks.state_layers import layers_with_state
from tests.engine.builders import (
    VOCAB_SIZE,
    MasklessActor,
    actor_config,
    build_engine,
    grpo_batch,
    one_sequence_each,
    relative_error,
    save_tokenizer,
)
from tests.engine.checks import train_once
from tests.models import tiny_model
from tests.rollout_server.builders import WITH_STATES

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(params=["qwen3_5_text", "lfm2"])
def hybrid(request, tmp_path):
    options = WITH_STATES[request.param] | {"vocab_size": VOCAB_SIZE}
    tiny_model(request.param, **options).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def test_packed_sequences_do_not_reach_one_another(hybrid):
    batch = grpo_batch()
    apart = one_sequence_each(len(batch["input_ids"]))
    expected = train_once(
        build_engine(MasklessActor, actor_config(hybrid, mb_spec=apart)), batch
    )
    packed = train_once(build_engine(DensePPOActor, actor_config(hybrid)), batch)
    # scans round differently in other batches: 1e-5 among runs of single sequences
    error = relative_error(packed["gradients"], expected["gradients"])
    assert error < 5e-5
    leaking = train_once(build_engine(MasklessActor, actor_config(hybrid)), batch)
    assert relative_error(leaking["gradients"], expected["gradients"]) > 0.01


def test_layers_with_a_state_are_found_without_their_class():
    for name, options in WITH_STATES.items():
        model = tiny_model(name, **options)
        kinds = {type(m).__name__[-8:] for m in layers_with_state(model).values()}
        assert kinds in ({"DeltaNet"}, {"hortConv"}), name
        assert len(layers_with_state(model)) == 3
    assert not layers_with_state(tiny_model("qwen3"))
    mamba = tiny_model(
        "mamba2",
        num_heads=4,
        head_dim=16,
        n_groups=1,
        attn_implementation="eager",
    )
    assert len(layers_with_state(mamba)) == 2
