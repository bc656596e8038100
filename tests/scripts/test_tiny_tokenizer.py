"""The shipped tokenizer and its chat template."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model.tokenizer import CHAT_TEMPLATE_FILE
from transformers import AutoTokenizer

from areal_dta.embedded import SYSTEM_PROMPT, generate_problems, tiny_model_path
from areal_dta.embedded.calculator import CALCULATOR_TOOL, tool_call_text

SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "What is 6*9?"}
CALL = (
    '<tool_call>{"name": "calculator", "arguments": {"expression": "6*9"}}</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model_path())


def render(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_problems_are_encoded_without_byte_fallback(tokenizer):
    for problem in generate_problems(50, seed=0):
        for text in problem.values():
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert len(ids) < len(text)


def test_digits_are_single_tokens(tokenizer):
    for token in tokenizer.get_vocab():
        if any(character.isdecimal() for character in token):
            assert len(token) == 1
    assert tokenizer.tokenize("12345") == list("12345")


@pytest.mark.parametrize(
    "token",
    "#### <tool_call> </tool_call> <tool_response> </tool_response> <think> </think> "
    "<|im_start|> <|im_end|> <|endoftext|>".split(),
)
def test_markup_is_a_single_token(tokenizer, token):
    assert tokenizer.tokenize(f"a{token}1") == ["a", token, "1"]


def test_special_tokens(tokenizer):
    assert len(tokenizer) == 512
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    ids = tokenizer(f"{CALL}#### 54<|im_end|>")["input_ids"]
    # Answers and calls stay visible where special tokens are left out.
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"{CALL}#### 54"


def test_the_template_of_the_model_is_the_one_in_the_package(tokenizer):
    assert tokenizer.chat_template == CHAT_TEMPLATE_FILE.read_text()


def test_a_plain_prompt(tokenizer):
    # Also with the flag that AReaL passes.
    kwargs = {"add_generation_prompt": True, "enable_thinking": False}
    assert render(tokenizer, [USER], **kwargs) == (
        "<|im_start|>user\nWhat is 6*9?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_all_roles_and_tools(tokenizer):
    arguments = {"expression": "6*9"}
    function = {"name": "calculator", "arguments": arguments}
    chat = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "54"},
        {"role": "assistant", "content": "#### 54"},
    ]
    expected = (
        "<|im_start|>system\nBe short.\nTools: calculator(expression)<|im_end|>\n"
        "<|im_start|>user\nWhat is 6*9?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>54</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n#### 54<|im_end|>\n"
    )
    assert render(tokenizer, chat, tools=[CALCULATOR_TOOL]) == expected
    # A call written by the model, or with its arguments as JSON text, looks the same.
    as_text = {"role": "assistant", "content": tool_call_text(arguments)}
    assert render(
        tokenizer, [*chat[:2], as_text, *chat[3:]], tools=[CALCULATOR_TOOL]
    ) == (expected)
    function["arguments"] = json.dumps(arguments)
    assert render(tokenizer, chat, tools=[CALCULATOR_TOOL]) == expected


def test_tools_without_a_system_message(tokenizer):
    bare = [{"name": "look", "parameters": {"properties": {"at": {}, "how": {}}}}]
    assert render(tokenizer, [USER], tools=[*bare, {"name": "wait"}]).startswith(
        "<|im_start|>system\nTools: look(at, how) wait()<|im_end|>\n<|im_start|>user"
    )


def test_a_prompt_is_the_prefix_of_its_continuation(tokenizer):
    chat = [SYSTEM, USER, {"role": "assistant", "content": "#### 54"}]
    prompt = render(tokenizer, chat[:2], add_generation_prompt=True)
    assert render(tokenizer, chat) == f"{prompt}#### 54<|im_end|>\n"


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="unknown role 'robot'"):
        render(tokenizer, [{"role": "robot", "content": "x"}])


def test_generation_marks_cover_the_assistant_only(tokenizer):
    chat = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "54"},
        {"role": "assistant", "content": "#### 54"},
    ]
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    masked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, marked in masked if marked]) == (
        f"{CALL}<|im_end|>#### 54<|im_end|>"
    )


def test_prompt_lengths(tokenizer):
    problem = generate_problems(1, seed=0)[0]
    user = {"role": "user", "content": problem["question"]}
    system = {"role": "system", "content": SYSTEM_PROMPT}
    lengths = [
        len(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        )
        for chat in ([user], [system, user])
    ]
    assert lengths[0] < 80 and 25 < lengths[1] - lengths[0] < 50
