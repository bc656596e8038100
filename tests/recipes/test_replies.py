"""What a model wrote: thoughts, texts, tool calls, and all that is wrong with them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.replies import (
    Call,
    Problem,
    Reply,
    ReplyError,
    assistant_message,
    parse_reply,
)

FIND = '<tool_call>\n{"name": "find", "arguments": {"bag": 7}}\n</tool_call>'


def content(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "text, reply",
    [
        ("Hello.", Reply("Hello.")),
        ("  Hello.\n<|im_end|>", Reply("Hello.")),
        ("<think>\nhm\n</think>\n\nHello.", Reply("Hello.")),
        (FIND, Reply("", (Call("find", {"bag": 7}),))),
        (f"Wait.\n{FIND}", Reply("Wait.", (Call("find", {"bag": 7}),))),
        (f"<think>\n{FIND}\n</think>\n\nHello.", Reply("Hello.")),
        (FIND + FIND, Reply("", (Call("find", {"bag": 7}),) * 2)),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            Reply("", (Call("f", {"a": 1}),)),
        ),
        (
            '<tool_call>{"name": "f", "arguments": ""}</tool_call>',
            Reply("", (Call("f", {}),)),
        ),
    ],
)
def test_what_is_in_a_text(text, reply):
    assert parse_reply(content(text)) == reply


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "done"}',
        '{"name": "done", "arguments": null}',
        '{"name": "done", "arguments": {}}',
        '{"name": "done", "arguments": ""}',
        '{"name": "done", "arguments": "null"}',
        '{"name": "done", "arguments": "{}"}',
        '{"name": "done", "parameters": {}}',
        '{"type": "function", "function": {"name": "done"}}',
        '\n```json\n{"name": "done"}\n```\n',
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "<tool_call>@</tool_call>",
        "<tool_call>@",
        "```\n<tool_call>@</tool_call>\n```",
        "<think>\n\n</think>\n\n<think><tool_call></think>\n<tool_call>@</tool_call>",
    ],
)
def test_a_call_without_arguments(form, call):
    assert parse_reply(content(form.replace("@", call))) == Reply(
        "", (Call("done", {}),)
    )


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "parameters": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
    ],
)
def test_other_names_of_the_arguments(text):
    assert parse_reply(content(text)) == Reply("", (Call("f", {"a": 1}),))


def test_a_forgotten_end_mark_between_two_calls():
    text = FIND.removesuffix("</tool_call>") + f"\n{FIND} So."
    assert parse_reply(content(text)) == Reply("So.", (Call("find", {"bag": 7}),) * 2)


@pytest.mark.parametrize(
    "arguments", [{}, {"arguments": None}, {"arguments": {}}, {"arguments": ""}]
)
def test_a_served_call_without_arguments(arguments):
    call = {"id": "c1", "function": {"name": "done", **arguments}}
    reply = parse_reply({"role": "assistant", "content": None, "tool_calls": [call]})
    assert reply == Reply("", (Call("done", {}, "c1"),))


def test_calls_that_a_server_parsed():
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c7", "function": {"name": "find", "arguments": '{"bag": 7}'}}
        ],
    }
    assert parse_reply(message) == Reply("", (Call("find", {"bag": 7}, "c7"),))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>find(7)</tool_call>",
        '<tool_call>{"name": "find", "arguments": {"bag": 7}</tool_call>',
        '<tool_call>["find"]</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'find', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "find"}</tool_call></tool_call>',
        '<tool_call>{"name": "find", "arguments": [7]}</tool_call>',
        '<tool_call>{"name": "find", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "find", ',
        "no call</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_broken_call(text):
    with pytest.raises(ReplyError) as raised:
        parse_reply(content(text))
    assert raised.value.problem is Problem.BROKEN_CALL
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("text", ["", " \n", None, "<think>cut off", "<|im_end|>"])
def test_an_empty_message(text):
    with pytest.raises(ReplyError) as raised:
        parse_reply(content(text))
    assert raised.value.problem is Problem.EMPTY


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        reply = parse_reply(content(text))
    except ReplyError:
        return
    assert reply.text or reply.calls


arguments = st.dictionaries(st.text(), st.integers() | st.text() | st.none())


@given(st.text(min_size=1), arguments)
def test_a_written_call_is_read_again(name, arguments):
    call = Call(name, arguments, "call_0")
    message = json.loads(json.dumps(assistant_message(None, [call])))
    assert parse_reply(message) == Reply("", (call,))
