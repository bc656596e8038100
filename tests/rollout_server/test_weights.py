import shutil
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from areal_dta.rollout_server import weights
from areal_dta.rollout_server.weights import CheckpointError
from tests.rollout_server.builders import (
    RunningServer,
    max_difference,
    model_for_generation,
    oracle_logprobs,
)


def load(path: Path) -> PreTrainedModel:
    return weights.load_model(str(path), torch.device("cpu"), "float32", "sdpa")


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equals(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3_moe", "llama"])
def test_weights_are_replaced_in_place(name: str, tmp_path: Path) -> None:
    old, new = model_for_generation(name), model_for_generation(name, seed=1)
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    model = load(tmp_path / "old")
    pointers = [p.data_ptr() for p in model.parameters()]
    assert equals(model, old.state_dict())
    weights.update_weights(model, str(tmp_path / "new"))
    assert equals(model, new.state_dict())
    assert pointers == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "is_converted"),
    [("qwen3", False), ("qwen3-tied", False), ("qwen3_moe", True)],
)
def test_only_what_needs_conversion_builds_a_second_model(
    name: str, is_converted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_for_generation(name, seed=1).save_pretrained(tmp_path / "new")
    model = model_for_generation(name)
    built = []
    stock = type(model).from_pretrained
    monkeypatch.setattr(
        type(model),
        "from_pretrained",
        lambda *args, **kwargs: built.append(1) or stock(*args, **kwargs),
    )
    weights.update_weights(model, str(tmp_path / "new"))
    assert bool(built) == is_converted


def test_sharded_checkpoints(tmp_path: Path) -> None:
    new = model_for_generation(seed=1)
    new.save_pretrained(tmp_path / "new", max_shard_size="20KB")
    assert len(list((tmp_path / "new").glob("*.safetensors"))) > 1
    model = model_for_generation()
    weights.update_weights(model, str(tmp_path / "new"))
    assert equals(model, new.state_dict())


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    new = model_for_generation(seed=1).to(torch.bfloat16)
    new.save_pretrained(tmp_path / "new")
    model = model_for_generation()
    weights.update_weights(model, str(tmp_path / "new"))
    assert model.dtype == torch.float32
    assert equals(model, {k: v.float() for k, v in new.state_dict().items()})


def edit(path: Path, change) -> None:
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


NORM = "model.norm.weight"


def break_missing(path: Path) -> None:
    edit(path, lambda state: state.pop(NORM))


def break_unknown(path: Path) -> None:
    edit(path, lambda state: state.update({"model.extra.weight": torch.ones(3)}))


def break_shape(path: Path) -> None:
    edit(path, lambda state: state.update({NORM: torch.ones(7)}))


def break_nan(path: Path) -> None:
    edit(path, lambda state: state[NORM].fill_(float("nan")))


def break_truncated(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def break_only_pickle(path: Path) -> None:
    state = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(state, path / "pytorch_model.bin")


def break_lora(path: Path) -> None:
    (path / "adapter_config.json").write_text("{}")


def break_gone(path: Path) -> None:
    shutil.rmtree(path)


BROKEN = [
    (break_missing, f"missing: {NORM}"),
    (break_unknown, "unknown to the model: model.extra.weight"),
    (break_shape, f"another shape .*{NORM}.*7.*32"),
    (break_nan, f"NaN or infinite weights in {NORM}"),
    (break_truncated, "cannot read"),
    (break_only_pickle, "cannot read"),
    (break_lora, "LoRA adapter"),
    (break_gone, "not a directory"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_bad_checkpoints_leave_the_model_untouched(
    tmp_path: Path, damage, message: str
) -> None:
    model_for_generation(seed=1).save_pretrained(tmp_path / "new")
    damage(tmp_path / "new")
    model = model_for_generation()
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=message):
        weights.update_weights(model, str(tmp_path / "new"))
    assert equals(model, before)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    model_for_generation("llama").save_pretrained(tmp_path / "new")
    model = model_for_generation()
    before = snapshot(model)
    with pytest.raises(CheckpointError, match="model_type='llama'"):
        weights.update_weights(model, str(tmp_path / "new"))
    assert equals(model, before)


def test_a_pickled_checkpoint_is_not_served(tmp_path: Path) -> None:
    model_for_generation().save_pretrained(tmp_path)
    break_only_pickle(tmp_path)
    with pytest.raises(CheckpointError, match="cannot load"):
        load(tmp_path)


def test_models_without_a_plain_cache_are_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=1
    )
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="MambaForCausalLM"):
        load(tmp_path)


def test_gpu_without_a_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="no GPU"):
        weights.pick_device("cuda")
    assert weights.pick_device("auto").type == "cpu"


def test_update_over_http(
    server: RunningServer, model, model_path: Path, tmp_path: Path
) -> None:
    def draw() -> tuple[list[int], list[float], int]:
        reply = server.generate([3, 1, 4], max_new_tokens=8, sampling_seed=1).json()
        entries = reply["meta_info"]["output_token_logprobs"]
        version = int(reply["meta_info"]["weight_version"])
        return [e[1] for e in entries], [e[0] for e in entries], version

    def update(path: Path, **options: object) -> requests.Response:
        body = {"model_path": str(path), "abort_all_requests": True, **options}
        return server.post("/update_weights_from_disk", body)

    _, old, old_version = draw()
    new_model = model_for_generation(seed=1)
    new_model.save_pretrained(tmp_path / "new")
    try:
        assert update(tmp_path / "new").json()["success"] is True
        tokens, new, version = draw()
        assert version == old_version + 1 and new != old
        expected = oracle_logprobs(new_model, [3, 1, 4], tokens, 1.0)
        assert max_difference(new, expected) < 1e-5

        break_shape(tmp_path / "new")
        refused = update(tmp_path / "new")
        assert refused.status_code == 400 and NORM in refused.reason
        assert draw() == (tokens, new, version)

        refused = update(tmp_path / "new", abort_all_requests=False)
        assert refused.status_code == 400 and "abort_all_requests" in refused.reason
    finally:
        assert update(model_path).status_code == 200
    assert draw()[1] == old


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    model = model_for_generation("qwen3-tied")
    model.save_pretrained(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    file = tmp_path / "bad" / "model.safetensors"
    state = load_file(file)
    embedding = state["model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
    state["lm_head.weight"] = embedding + 0.02 * noise
    save_file(state, file, metadata={"format": "pt"})

    served = load(tmp_path / "good")
    before = snapshot(served)
    with pytest.raises(CheckpointError, match="embed_tokens.weight and lm_head.weight"):
        weights.update_weights(served, str(tmp_path / "bad"))
    assert equals(served, before)
    # The same weight twice is no contradiction.
    state["lm_head.weight"] = embedding.clone()
    save_file(state, file, metadata={"format": "pt"})
    weights.update_weights(served, str(tmp_path / "bad"))
    assert equals(served, before)


def test_a_tied_checkpoint_that_differs_is_served_as_stored(tmp_path: Path) -> None:
    model_for_generation("qwen3-tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 1.5
    save_file(state, file, metadata={"format": "pt"})
    assert torch.equal(load(tmp_path).lm_head.weight, state["lm_head.weight"])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_what_depends_on_the_neighbours_is_refused(rope: dict, tmp_path: Path) -> None:
    name = "phi3" if rope["rope_type"] == "longrope" else "llama"
    odd = model_for_generation(name, rope_parameters=rope)
    odd.save_pretrained(tmp_path / "odd")
    with pytest.raises(CheckpointError, match=f"rope_type='{rope['rope_type']}'"):
        load(tmp_path / "odd")
    # The same weights, with a configuration that came later.
    plain = model_for_generation(name)
    plain.save_pretrained(tmp_path / "plain")
    served = load(tmp_path / "plain")
    before = snapshot(served)
    with pytest.raises(CheckpointError, match="rope_parameters"):
        weights.update_weights(served, str(tmp_path / "odd"))
    assert equals(served, before)
