"""A workflow for rollout workers: generates from the prompt that it is given."""

import uuid
from typing import Any

import torch
from areal.api import InferenceEngine, ModelRequest, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters


class GenerateWorkflow(RolloutWorkflow):
    def __init__(self, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=list(data["prompt"]),
            gconfig=GenerationHyperparameters(
                max_new_tokens=self.max_new_tokens, ignore_eos=True
            ),
        )
        response = await engine.agenerate(request)
        num_prompt = len(data["prompt"])
        sequence = torch.tensor([response.input_tokens + response.output_tokens])
        return {
            "input_ids": sequence,
            "attention_mask": torch.ones_like(sequence, dtype=torch.bool),
            "logprobs": torch.tensor([[0.0] * num_prompt + response.output_logprobs]),
            "versions": torch.tensor([[-1] * num_prompt + response.output_versions]),
        }
