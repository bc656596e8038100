"""The client: bounded in time and retries, and clear about what went wrong."""

import asyncio
import socket
import time

import pytest

from recipes.chat import ChatClient, ChatOptions, ContextFullError, ServerError
from tests.recipes import stub_server
from tests.recipes.stub_server import StubServer

HELLO = [{"role": "user", "content": "Hello"}]


def ask(url, **options):
    async def run():
        client = ChatClient(
            ChatOptions(base_url=url, **options), "the user model", "start it"
        )
        try:
            return await client.complete(HELLO, options.get("tools", ()))
        finally:
            await client.close()

    return asyncio.run(run())


def test_an_answer_comes_as_it_was_sent():
    with StubServer(lambda request: "Hi") as server:
        message = ask(server.url, model="m", max_tokens=7, temperature=0.5)
    assert message == {"role": "assistant", "content": "Hi"}
    (request,) = server.requests
    assert request["messages"] == HELLO
    assert (request["model"], request["max_tokens"]) == ("m", 7)
    assert request["temperature"] == 0.5


def test_extra_fields_reach_the_server():
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    with StubServer(lambda request: "Hi") as server:
        ask(server.url, extra_body=extra)
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_no_server_names_the_url_and_the_remedy():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(ServerError, match=f"user model at {url} .*; start it"):
            ask(url, max_retries=1)


def test_retries_are_bounded():
    with StubServer(lambda request: 503) as server:
        with pytest.raises(ServerError, match="refused, status 503"):
            ask(server.url, max_retries=2)
    assert len(server.requests) == 3


def test_a_passing_failure_is_retried():
    answers = [503, "Hi"]
    with StubServer(lambda request: answers.pop(0)) as server:
        assert ask(server.url, max_retries=2)["content"] == "Hi"


def test_a_slow_server():
    with StubServer(lambda request: time.sleep(3) or "late") as server:
        message = r"did not answer within 0.2 s, 2 times"
        with pytest.raises(ServerError, match=message):
            ask(server.url, timeout_seconds=0.2, max_retries=1)
    assert len(server.requests) == 2


def test_a_refusal_is_not_retried():
    with StubServer(lambda request: 400) as server:
        with pytest.raises(ServerError, match="refused"):
            ask(server.url, max_retries=3)
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [{}, {"choices": []}, [], {"choices": [{}]}])
def test_an_answer_that_is_none(answer, monkeypatch):
    monkeypatch.setattr(stub_server, "completion", lambda message: answer)
    with StubServer(lambda request: "Hi") as server:
        with pytest.raises(ServerError, match="answered with nonsense"):
            ask(server.url)


def test_a_full_context_is_told_apart():
    body = b'{"detail": "len of prompt tokens 9 exceeds max_total_tokens 8"}'
    with StubServer(lambda request: body) as server:
        with pytest.raises(ContextFullError):
            ask(server.url)
