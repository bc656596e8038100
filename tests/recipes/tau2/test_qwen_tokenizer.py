"""Qwen3's tokenizer without a hub: its ids, and the text of its chat template."""

import json
from pathlib import Path

import pytest

from recipes.tau2.recorded.qwen_tokenizer import build_qwen_tokenizer, load_tokenizer

TRAJECTORIES = Path(__file__).parents[3] / "../shared/data/tau2/trajectories.jsonl"

SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "find", "description": "é <b>'s"}}
FIND = {"type": "function", "function": {"name": "find", "arguments": {"bag": 7}}}
FIND_TEXT = (
    '<tool_call>\n{"name": "find", "arguments": {"bag": 7}}\n</tool_call><|im_end|>\n'
)
TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "find", "description": "é <b>'s"}}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
TEXTS = [
    "Hello, world! It's 2024-05-13; 12345 + 678 = ?",
    "def f(x):\n\treturn x  # tab\n\n\n    done   ",
    'I don\'t know\u2014really. {"a": [1, 2.50, null]} \u00e9 vs e\u0301',
    "\u4f60\u597d\uff0c\u4e16\u754c \u041f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f600\u200d\u0301 \u00a0x",
    "\n\n  leading, trailing  \r\n\r\n",
]


def render(tokenizer, *messages, **options):
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls, **more):
    return {"role": "assistant", "content": text, "tool_calls": list(calls), **more}


def tool(text):
    return {"role": "tool", "content": text}


@pytest.mark.parametrize(
    "text, ids",
    [
        ("Hello, world!", [9707, 11, 1879, 0]),
        ("<|im_start|>assistant\n", [151644, 77091, 198]),
        ("<|im_start|>user\n", [151644, 872, 198]),
        ("<think>\n\n</think>\n\n", [151667, 271, 151668, 271]),
        ("<tool_call></tool_call>", [151657, 151658]),
        ("<tool_response></tool_response>", [151665, 151666]),
        ("<|im_end|><|endoftext|>", [151645, 151643]),
    ],
)
def test_ids_are_those_of_qwen3(qwen, text, ids):
    assert qwen(text)["input_ids"] == ids
    assert qwen.decode(ids) == text


def test_size_and_special_tokens(qwen):
    assert len(qwen) == 151669
    assert (qwen.eos_token_id, qwen.pad_token_id) == (151645, 151643)
    reply = qwen("<think>a</think><tool_call><|im_end|>")["input_ids"]
    assert qwen.decode(reply, skip_special_tokens=True) == "<think>a</think><tool_call>"


def test_ids_equal_those_of_tiktoken(qwen):
    reference = pytest.importorskip("qwen_agent.utils.tokenization_qwen").tokenizer
    texts = list(TEXTS)
    if TRAJECTORIES.exists():
        for line in TRAJECTORIES.read_text().splitlines()[::3]:
            texts += [json.dumps(m) for m in json.loads(line)["messages"]]
    for text in texts:
        assert qwen(text)["input_ids"] == reference.encode(text), text


def test_a_saved_tokenizer_loads_by_path(qwen, tmp_path):
    qwen.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    for text in TEXTS:
        assert loaded(text)["input_ids"] == qwen(text)["input_ids"]
    assert render(loaded, SYSTEM, user("Hi")) == render(qwen, SYSTEM, user("Hi"))
    assert loaded.eos_token == "<|im_end|>"


def test_a_path_without_tokenizer(tmp_path, letters):
    with pytest.raises(ValueError, match="no tokenizer at .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
    letters.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(str(tmp_path))


def test_a_file_that_is_no_vocabulary(tmp_path):
    file = tmp_path / "qwen.tiktoken"
    file.write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="holds 2 tokens"):
        build_qwen_tokenizer(file)
    file.write_text("not a vocabulary at all")
    with pytest.raises(ValueError, match="not a tiktoken vocabulary"):
        build_qwen_tokenizer(file)


def test_template_without_tools(letters):
    assert render(letters, SYSTEM, user("Hi"), add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_puts_tools_into_the_system_turn(letters):
    assert render(letters, SYSTEM, tools=[TOOL]) == (
        f"<|im_start|>system\nBe kind.\n\n{TOOLS_TEXT}<|im_end|>\n"
    )
    assert render(letters, user("Hi"), tools=[TOOL]) == (
        f"<|im_start|>system\n{TOOLS_TEXT}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_template_of_tool_calls_and_results(letters):
    text_call = {"name": "find", "arguments": '{"bag":8}'}  # as an API returns it
    text = render(
        letters,
        user("Hi"),
        assistant("Wait.", FIND, text_call),
        tool("Rome"),
        tool("Oslo"),
        assistant(None, FIND),
        tool("Rome"),
        user("Thanks"),
    )
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nWait.\n"
        '<tool_call>\n{"name": "find", "arguments": {"bag": 7}}\n</tool_call>\n'
        '<tool_call>\n{"name": "find", "arguments": {"bag":8}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nRome\n</tool_response>\n"
        "<tool_response>\nOslo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
        f"{FIND_TEXT}"
        "<|im_start|>user\n<tool_response>\nRome\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
    )


def test_template_keeps_thoughts_since_the_last_question_only(letters):
    early = assistant("<think>\nearly\n</think>\n\nOne.")
    late = assistant("", FIND, reasoning_content="late\n")
    messages = [user("Hi"), early, user("Hi"), late, tool("Rome")]
    assert render(letters, *messages) == (
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nOne.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nlate\n</think>\n\n"
        f"{FIND_TEXT}"
        "<|im_start|>user\n<tool_response>\nRome\n</tool_response><|im_end|>\n"
    )
    assert "early" in render(letters, user("Hi"), early, assistant("Two."))
    # A wrapped tool result in a user message is no question.
    wrapped = user("<tool_response>\nRome\n</tool_response>")
    assert "early" in render(letters, user("Hi"), early, wrapped)


def test_template_with_thinking_off(letters):
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    options = {"add_generation_prompt": True}
    hi = user("Hi")
    assert render(letters, hi, **options) == prompt
    assert render(letters, hi, enable_thinking=True, **options) == prompt
    off = render(letters, hi, enable_thinking=False, **options)
    assert off == prompt + "<think>\n\n</think>\n\n"
    # The last turn shows that it had none.
    assert render(letters, hi, assistant("One.")).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\nOne.<|im_end|>\n"
    )
