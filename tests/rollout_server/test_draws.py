"""Samples of a prompt, turns of a sample, and prompts never share a stream."""

import asyncio
import logging
from typing import Any

import pytest
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig

from areal_dta.collector.prompt_issuer import PROMPT_ID_KEY
from areal_dta.rollout_server.areal_backend import LocalBackend, LocalEngine


class Calls(RolloutWorkflow):
    """Two calls per sample, whose draw keys it returns."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        assert data == {"messages": "x"}  # rewards see the data set's keys alone
        keys = []
        for _ in range(2):
            await asyncio.sleep(0)
            keys.append(params(engine, [3, 1])["draw_key"])
        RESULTS.append(keys)


RESULTS: list[list[str]] = []


def params(backend: LocalBackend, prompt: list[int], version: int = 0) -> dict:
    request = ModelRequest(input_ids=prompt, gconfig=GenerationHyperparameters())
    built = backend.build_generation_request(request, False, version)
    return built.payload["sampling_params"]


def run(engine: LocalEngine, prompt_id: str | None, group_size: int) -> list[list[str]]:
    RESULTS.clear()
    data = {"messages": "x"}
    if prompt_id is not None:
        data[PROMPT_ID_KEY] = prompt_id
    workflow = engine._engine._resolve_workflow(Calls(), group_size=group_size)
    asyncio.run(workflow.arun_episode(engine._engine.backend, data))
    return list(RESULTS)


@pytest.fixture
def engine() -> LocalEngine:
    config = InferenceEngineConfig(
        backend="sglang:d1", experiment_name="draws", trial_name="trial"
    )
    engine = LocalEngine(config)
    engine._engine.logger = logging.getLogger(__name__)  # AReaL's comes with a server
    return engine


@pytest.mark.parametrize("group_size", [1, 3])
def test_a_prompts_samples_and_turns(engine: LocalEngine, group_size: int) -> None:
    keys = run(engine, "17/0", group_size)
    assert keys == [
        [f"prompt/17/0/{sample}/{turn}" for turn in range(2)]
        for sample in range(group_size)
    ]
    # A resumed run starts with fresh clients, in another order: the same keys.
    run(engine, "4/0", group_size)
    assert run(engine, "17/0", group_size) == keys
    # A second try is another draw.
    flat = {key for sample in keys for key in sample}
    again = run(engine, "17/1", group_size)
    assert not flat & {key for sample in again for key in sample}


def test_without_ids_tokens_tell_prompts_apart(engine: LocalEngine) -> None:
    keys = [key for sample in run(engine, None, 3) for key in sample]
    assert len(set(keys)) == 6
    backend = LocalBackend()
    drawn = [
        params(backend, prompt, version)["draw_key"]
        for version in (0, 1)
        for prompt in ([3, 1], [3, 1], [3, 2])
    ]
    assert len(set(drawn)) == 6
    # Order and client make no difference to the n-th answer to a prompt.
    other = LocalBackend()
    assert params(other, [3, 2])["draw_key"] == drawn[2]
    assert params(other, [3, 1])["draw_key"] == drawn[0]


def test_an_interrupted_answer_keeps_its_key_and_goes_on() -> None:
    backend = LocalBackend()
    request = ModelRequest(input_ids=[3], gconfig=GenerationHyperparameters())

    def sent(version: int) -> tuple[str, int]:
        built = backend.build_generation_request(request, False, version)
        params = built.payload["sampling_params"]
        return params["draw_key"], params["num_drawn"]

    key, num_drawn = sent(0)
    assert num_drawn == 0
    request.input_ids += [1, 4]
    assert sent(1) == (key, 2)
