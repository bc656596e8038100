"""A small recorded episode, and its tokens as texts."""

from recipes.tau2.domains import AgentContext
from recipes.tau2.recorded.trajectories import Trajectory


class Own(str):
    """Text that the agent's model wrote."""


def call(name, requestor="assistant", **arguments):
    return {"id": "1", "name": name, "arguments": arguments, "requestor": requestor}


def tool_result(text, requestor="assistant"):
    return {"role": "tool", "id": "1", "content": text, "requestor": requestor}


DIALOGUE = (
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Where is my bag?"},
    {"role": "assistant", "content": None, "tool_calls": [call("find", bag=7)]},
    tool_result("Rome"),
    {"role": "assistant", "content": "Look at it."},
    {"role": "user", "content": None, "tool_calls": [call("look", "user")]},
    tool_result("blue", "user"),
    {"role": "user", "content": "It is blue."},
    {"role": "assistant", "content": "Yours."},
    {"role": "user", "content": "###STOP###"},
)
SOLO = (
    {"role": "assistant", "content": None, "tool_calls": [call("find"), call("pay")]},
    tool_result("Rome"),
    tool_result("paid"),
    {"role": "assistant", "content": "###STOP###"},
)
# What joins the prompt before each call of the dialogue, and what the model writes.
BEGIN = (
    "<|im_start|>system\nBe kind.<|im_end|>\n"
    "<|im_start|>assistant\nHi!<|im_end|>\n"
    "<|im_start|>user\nWhere is my bag?<|im_end|>\n<|im_start|>assistant\n"
)
FIND = Own(
    '<tool_call>\n{"name": "find", "arguments": {"bag": 7}}\n</tool_call><|im_end|>'
)
FOUND = (
    "\n<|im_start|>user\n<tool_response>\nRome\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
LOOK = Own("Look at it.<|im_end|>")
BLUE = "\n<|im_start|>user\nIt is blue.<|im_end|>\n<|im_start|>assistant\n"
YOURS = Own("Yours.<|im_end|>")
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
NO_THOUGHT = "<think>\n\n</think>\n\n"


def context(domain, task_id):
    return AgentContext("Be kind.", ())


def trajectory(messages=DIALOGUE, domain="airline", episode=3, task_id="t"):
    return Trajectory(episode, domain, task_id, 2, 0.5, messages)


def sequences(batch):
    return [
        (batch.sequence(i).tolist(), batch.mask(i).tolist())
        for i in range(batch.num_sequences)
    ]


def expected(tokenizer, *pieces):
    tokens, mask = [], []
    for piece in pieces:
        ids = tokenizer(str(piece))["input_ids"]
        tokens += ids
        mask += [isinstance(piece, Own)] * len(ids)
    return tokens, mask
