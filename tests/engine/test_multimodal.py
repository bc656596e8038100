"""Multimodal checkpoints: text is trained as by AReaL's engine, exported as it came."""

import json

import pytest
import torch
from areal.api import SaveLoadMeta
from areal.api.cli_args import OptimizerConfig
from safetensors.torch import load_file

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import DensePPOActor, DTAPPOActor
from tests.engine.builders import (
    VOCAB_SIZE,
    MasklessActor,
    actor_config,
    build_engine,
    grpo_batch,
    one_sequence_each,
    save_tokenizer,
)
from tests.engine.checks import assert_same_update, grpo_loss, loss_tokens, train_once
from tests.models import tiny_multimodal

pytestmark = pytest.mark.usefixtures("world")

ADAM = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps_proportion=0.0)


@pytest.fixture(scope="module")
def mistral3(tmp_path_factory):
    path = tmp_path_factory.mktemp("mistral3")
    tiny_multimodal("mistral3", vocab_size=VOCAB_SIZE + 4).save_pretrained(path)
    return save_tokenizer(path)


def tree(path, **overrides):
    config = actor_config(path, **overrides)
    dta = DTAOptions(block_tokens=6, retain_tokens=9)
    return build_engine(DTAPPOActor, DTAPPOActorConfig(**vars(config), dta=dta))


def test_an_update_on_text_equals_areal_s(mistral3):
    batch = grpo_batch()
    spec = one_sequence_each(len(batch["input_ids"]))
    stock = build_engine(MasklessActor, actor_config(mistral3, mb_spec=spec))
    expected = train_once(stock, batch)
    assert_same_update(train_once(tree(mistral3), batch), expected)
    packed = build_engine(DensePPOActor, actor_config(mistral3))
    assert_same_update(train_once(packed, batch), expected)


def test_the_export_has_the_names_and_the_configuration_that_came(mistral3, tmp_path):
    engine = tree(mistral3, optimizer=ADAM)
    train_once(engine, grpo_batch())
    engine.save(SaveLoadMeta(str(tmp_path), "hf", False, engine.tokenizer, None))
    came, went = (load_file(p / "model.safetensors") for p in (mistral3, tmp_path))
    assert came.keys() == went.keys()
    changed = {name for name in came if not torch.equal(came[name], went[name])}
    assert changed and all(name.startswith("language_model.") for name in changed)
    stored = [json.loads((p / "config.json").read_text()) for p in (mistral3, tmp_path)]
    assert stored[0] == stored[1]


def test_a_batch_with_images_is_refused_and_the_next_one_is_trained(mistral3):
    engine, batch = tree(mistral3), grpo_batch()
    images = [{} for _ in batch["input_ids"]]
    images[1] = {"pixel_values": torch.ones(1, 3, 28, 28)}
    with pytest.raises(ValueError, match=r"images .*multi_modal_input.* text alone"):
        engine.train_batch(
            {**batch, "multi_modal_input": images}, grpo_loss(), loss_tokens
        )
    no_images = [{} for _ in images]
    train_once(engine, {**batch, "multi_modal_input": no_images})
