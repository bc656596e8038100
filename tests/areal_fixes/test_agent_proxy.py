"""Episodes through AReaL's proxy and workflow, on the embedded server and model.

What is real here: tau2's environment and evaluator, AReaL's proxy server, client and
agent workflow, the rollout server with the embedded model. Only the processes are
fewer than in a run.
"""

import asyncio
import threading
import time
from dataclasses import asdict
from importlib.util import find_spec

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from areal.api.cli_args import AgentConfig, InferenceEngineConfig
from areal.experimental.openai import OpenAIProxyWorkflow
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.utils.data import concat_padded_tensors
from areal.utils.network import find_free_ports
from fastapi import FastAPI, Request
from starlette.middleware.base import BaseHTTPMiddleware
from transformers import AutoModelForCausalLM

from areal_dta.areal_fixes import agent_proxy as proxy
from areal_dta.config.server_options import LocalServerConfig
from areal_dta.embedded import tiny_model_path
from areal_dta.rollout_server.areal_backend import LocalEngine
from areal_dta.tree import PrefixTree

needs_tau2 = pytest.mark.skipif(not find_spec("tau2"), reason="needs the extra tau2")
KEY = "a secret of this test"


def agent_config(**changes):
    return AgentConfig(
        agent_cls_path="not.Used", admin_api_key=KEY, engine_max_tokens=2048, **changes
    )


@pytest.fixture(scope="module")
def engine():
    path = tiny_model_path()
    config = InferenceEngineConfig(
        backend="sglang:d1",
        tokenizer_path=path,
        setup_timeout=300,
        request_timeout=120,
        agent=agent_config(),
    )
    engine = LocalEngine(config)
    info = engine.launch_server(asdict(LocalServerConfig(model_path=path)))
    engine.initialize(addr=f"{info.host}:{info.port}")
    yield engine
    engine.destroy()


@pytest.fixture
def serve(engine, monkeypatch):
    """Runs the patched proxy in a thread; gives its address."""
    proxy.alias_litellm()
    from areal.experimental.openai.proxy import proxy_rollout_server as server

    for name in ("_setup_openai_client", "serialize_interactions"):
        monkeypatch.setattr(server, name, getattr(server, name))
    monkeypatch.setattr(server.app, "user_middleware", [])
    monkeypatch.setattr(server.app, "middleware_stack", None)
    monkeypatch.setattr(server, "_engine", engine)
    monkeypatch.setattr(server, "_server_host", "127.0.0.1")
    proxy.pass_template_kwargs(server)
    proxy.mark_trajectory_starts(server)
    undo = proxy.accept_empty_replies()
    running = []

    def start(**agent):
        engine.config.agent = agent_config(**agent)
        server._setup_openai_client()
        (port,) = find_free_ports(1)
        uvicorn_server = uvicorn.Server(
            uvicorn.Config(server.app, port=port, log_level="warning")
        )
        thread = threading.Thread(target=uvicorn_server.run, daemon=True)
        thread.start()
        running.append((uvicorn_server, thread))
        deadline = time.monotonic() + 60
        while not uvicorn_server.started and time.monotonic() < deadline:
            time.sleep(0.05)
        return f"http://127.0.0.1:{port}"

    yield start
    undo()
    for uvicorn_server, thread in running:
        uvicorn_server.should_exit = True
        thread.join(timeout=30)


def play(engine, address, agent, data, style="individual", discount=1.0):
    """One episode; its sequences as AReaL's rollout workers hand them on."""
    workflow = OpenAIProxyWorkflow(
        mode="inline",
        agent=agent,
        proxy_addr=address,
        admin_api_key=KEY,
        export_style=style,
        discount=discount,
    )

    async def run():
        workflow_context.set(WorkflowContext(task_id=time.monotonic_ns()))
        try:
            interactions = await workflow.arun_episode(engine, data)
        finally:
            await (await workflow_context.get_aiohttp_session()).close()
            await (await workflow_context.get_httpx_client()).aclose()
        return [i.to_tensor_dict() for i in interactions.values()]

    return asyncio.run(run())


def tau2_agent(**changes):
    from areal.api.cli_args import GenerationHyperparameters

    from recipes.tau2.options import Tau2Options, UserOptions
    from recipes.tau2.workflow import Tau2Workflow, workflow_kwargs

    options = Tau2Options(
        domain="mock", user=UserOptions(max_replies=3), reward_processes=1, **changes
    )
    gconfig = GenerationHyperparameters(max_new_tokens=24)
    return Tau2Workflow(**workflow_kwargs(options, gconfig, False))


def sequences(rows):
    return [row["input_ids"][0].numpy().astype(np.int64) for row in rows]


def trained(row):
    return row["loss_mask"][0].bool().tolist()


@torch.no_grad()
def check_logprobs(rows):
    """The server's logprobs are those of the model; the data says of which tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    num_checked = 0
    for row in rows:
        logits = model(row["input_ids"]).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, row["input_ids"][0, 1:, None])[:, 0]
        mask = row["loss_mask"][0, 1:].bool()
        assert (row["versions"][0, 1:][mask] == 0).all()
        assert (row["logprobs"][0, 1:] - own)[mask].abs().max() < 1e-3
        num_checked += int(mask.sum())
    return num_checked


def episodes(engine, address, **kwargs):
    """The first episodes with several calls: the model may err on its first."""
    found = []
    for _ in range(6):
        data = {"domain": "mock", "task_id": "update_task_1"}
        rows = play(engine, address, tau2_agent(), data, **kwargs)
        if len(rows) > 1 or kwargs:
            found.append(rows)
        if len(found) == 2:
            break
    return found


@needs_tau2
def test_an_episode_becomes_a_sequence_a_call(engine, serve):
    address = serve()
    found = episodes(engine, address)
    assert found
    for rows in found:
        assert [int(row["begin_of_trajectory"]) for row in rows] == [
            1,
            *[0] * (len(rows) - 1),
        ]
        tree = PrefixTree.from_sequences(sequences(rows))
        # two calls share all but the turns between them; three share more
        assert tree.sharing_ratio > (1.5 if len(rows) == 2 else 2)
        for row in rows:
            mask = trained(row)
            start = mask.index(True)
            assert not any(mask[:start]) and all(mask[start:])
        assert len({float(row["rewards"]) for row in rows}) == 1
        assert check_logprobs(rows) == sum(sum(trained(row)) for row in rows)
    batch = concat_padded_tensors([row for rows in found for row in rows])
    assert batch["begin_of_trajectory"].tolist() == [
        int(i == 0) for rows in found for i in range(len(rows))
    ]


@needs_tau2
def test_an_episode_becomes_one_sequence(engine, serve):
    address = serve(export_style="concat", chat_template_type="concat")
    for rows in episodes(engine, address, style="concat"):
        (row,) = rows
        mask = np.array(trained(row))
        num_replies = int((np.diff(mask.astype(int), prepend=0) == 1).sum())
        assert num_replies >= 1
        assert check_logprobs(rows) == mask.sum()


def test_a_turn_discount_reaches_earlier_calls(engine, serve):
    class TwoCalls:
        async def run(self, data, base_url, api_key, http_client):
            from recipes.chat import ChatClient, ChatOptions

            options = ChatOptions(base_url=base_url, api_key=api_key, max_tokens=4)
            client = ChatClient(options, "the proxy", "-", http_client)
            messages = [{"role": "user", "content": "1+1?"}]
            messages.append(await client.complete(messages))
            messages.append({"role": "user", "content": "2+2?"})
            await client.complete(messages)
            return 1.0

    rows = play(engine, serve(), TwoCalls(), {}, discount=0.5)
    assert [float(row["rewards"]) for row in rows] == [0.5, 1.0]


def test_a_conversation_that_outgrows_the_model_is_told_so(engine, serve):
    from recipes.chat import ChatClient, ChatOptions, ContextFullError

    class TooLong:
        async def run(self, data, base_url, api_key, http_client):
            options = ChatOptions(base_url=base_url, api_key=api_key, max_tokens=4)
            client = ChatClient(options, "the proxy", "-", http_client)
            await client.complete([{"role": "user", "content": "1"}])
            with pytest.raises(ContextFullError):
                await client.complete([{"role": "user", "content": "1 " * 3000}])
            return 0.25

    (row,) = play(engine, serve(), TooLong(), {})
    assert float(row["rewards"]) == 0.25


def test_an_empty_reply_is_recorded_and_trained(engine, serve, monkeypatch):
    from areal.api import ModelResponse

    from recipes.chat import ChatClient, ChatOptions

    class OneCall:
        async def run(self, data, base_url, api_key, http_client):
            client = ChatClient(
                ChatOptions(base_url=base_url, api_key=api_key),
                "the proxy",
                "-",
                http_client,
            )
            message = await client.complete([{"role": "user", "content": "1+1?"}])
            assert message["content"] == ""
            return 0.0

    async def says_nothing(request):
        end = request.tokenizer.eos_token_id
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=[end],
            output_logprobs=[-0.5],
            output_versions=[0],
            stop_reason="stop",
            tokenizer=request.tokenizer,
        )

    address = serve()
    monkeypatch.setattr(engine, "agenerate", says_nothing)
    (row,) = play(engine, address, OneCall(), {})
    assert trained(row)[-1] and sum(trained(row)) == 1


def test_the_key_of_the_proxy_is_asked_for(serve):
    response = httpx.post(
        f"{serve()}/grant_capacity", headers={"Authorization": "Bearer areal-admin-key"}
    )
    assert response.status_code == 403


@pytest.mark.parametrize(
    "body, seen",
    [
        ('{"chat_template_kwargs": {"enable_thinking": false}, "a": 1}', "False"),
        ('{"a": 1}', "None"),
        ('{"chat_template_kwargs": 3}', "None"),
        ("no JSON", "None"),
        ("[]", "None"),
    ],
)
def test_template_arguments_reach_the_handler(body, seen):
    app = FastAPI()

    @app.post("/chat/completions")
    async def handle(request: Request):
        given = proxy._template_kwargs.get() or {}
        return {"seen": str(given.get("enable_thinking")), "body": await request.body()}

    keep = proxy.keep_template_kwargs("/chat/completions")
    app.add_middleware(BaseHTTPMiddleware, dispatch=keep)

    async def post():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as c:
            return (await c.post("/chat/completions", content=body)).json()

    assert asyncio.run(post()) == {"seen": seen, "body": body}
