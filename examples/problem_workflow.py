"""A rollout workflow of one's own: one question, one answer, one reward.

Workers import it by the name of its module: it must not be in the script that is run.
"""

import re
import uuid

import torch
from areal.api import ModelRequest, RolloutWorkflow
from areal.utils.hf_utils import load_hf_tokenizer


def last_number(text: str) -> str:
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return numbers[-1] if numbers else ""


class ProblemWorkflow(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer):
        self.tokenizer = load_hf_tokenizer(tokenizer)
        gconfig = gconfig.new_with_stop_and_pad_token_ids(self.tokenizer)
        self.gconfig = gconfig.new(n_samples=1)

    async def arun_episode(self, engine, data):
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": data["question"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=prompt,
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
        )
        response = await engine.agenerate(request)
        answer = self.tokenizer.decode(response.output_tokens)
        reward = float(last_number(answer) == last_number(data["answer"]))
        num_prompt, num_new = response.input_len, response.output_len
        row = {
            "input_ids": response.input_tokens + response.output_tokens,
            "loss_mask": [0] * num_prompt + [1] * num_new,
            "logprobs": [0.0] * num_prompt + response.output_logprobs,
            "versions": [-1] * num_prompt + response.output_versions,
            "attention_mask": [1] * (num_prompt + num_new),
            "rewards": reward,
        }
        return {key: torch.tensor(value)[None] for key, value in row.items()}
