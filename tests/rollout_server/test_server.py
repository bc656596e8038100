"""The server as its clients see it: one process, real HTTP."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import requests

from areal_dta.config.server_options import LocalServerConfig
from areal_dta.rollout_server.app import UNSUPPORTED_ENDPOINTS
from areal_dta.rollout_server.server import (
    EXIT_BAD_CONFIG,
    EXIT_PORT_IN_USE,
    build_command,
    parse_options,
)
from tests.rollout_server.builders import (
    CONTEXT_LENGTH,
    EXIT_TIMEOUT_SECONDS,
    START_TIMEOUT_SECONDS,
    VOCAB_SIZE,
    RunningServer,
    free_port,
    is_gone,
    is_healthy,
    max_difference,
    oracle_logprobs,
    running_server,
    wait_until,
)

LONG = {"max_new_tokens": CONTEXT_LENGTH - 10, "ignore_eos": True}


def test_generate(server: RunningServer, model) -> None:
    reply = server.generate([3, 1, 4], max_new_tokens=12, temperature=0.7).json()
    meta = reply["meta_info"]
    tokens = [entry[1] for entry in meta["output_token_logprobs"]]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    assert tokens == reply["output_ids"]
    assert meta["prompt_tokens"] == 3
    assert meta["completion_tokens"] == len(tokens)
    assert (
        max_difference(logprobs, oracle_logprobs(model, [3, 1, 4], tokens, 0.7)) < 1e-5
    )


def test_finish_reasons(server: RunningServer) -> None:
    def finish(**params):
        return server.generate([3], **params).json()["meta_info"]["finish_reason"]

    assert finish(max_new_tokens=4, ignore_eos=True) == {"type": "length", "length": 4}
    everything = list(range(VOCAB_SIZE))
    stopped = finish(max_new_tokens=4, stop_token_ids=everything)
    assert stopped["type"] == "stop" and stopped["matched"] in everything
    # As in SGLang, ignore_eos also ignores stop_token_ids.
    ignored = finish(max_new_tokens=4, stop_token_ids=everything, ignore_eos=True)
    assert ignored["type"] == "length"


def test_the_models_eos_stops(server: RunningServer, model) -> None:
    eos = model.config.eos_token_id
    for seed in range(40):
        reply = server.generate([3], max_new_tokens=200, sampling_seed=seed).json()
        if reply["meta_info"]["finish_reason"]["type"] == "stop":
            assert reply["output_ids"].index(eos) == len(reply["output_ids"]) - 1
            return
    pytest.fail("EOS never came up")


def test_sampling_seed_repeats_and_requests_differ(server: RunningServer) -> None:
    def draw(**params):
        reply = server.generate([3], max_new_tokens=30, ignore_eos=True, **params)
        return reply.json()["output_ids"]

    assert draw(sampling_seed=5) == draw(sampling_seed=5) != draw(sampling_seed=6)
    assert draw() != draw()


def test_prompt_logprobs(server: RunningServer, model) -> None:
    """The request that AReaL sends to score with a teacher."""
    prompt = [3, 1, 4, 1, 5, 9]
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 0,
        "stream": False,
    }
    entries = server.post("/generate", body).json()["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == prompt[3:]
    expected = oracle_logprobs(model, prompt[:3], prompt[3:], 1.0)
    assert max_difference([entry[0] for entry in entries], expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [[1, 2]]}, "input_ids.0"),
        ({"input_ids": ["1"]}, "input_ids.0"),
        ({"input_ids": [1, VOCAB_SIZE]}, f"token {VOCAB_SIZE} at position 1"),
        ({"input_ids": [1, -1]}, "token -1 at position 1"),
        ({"input_ids": [1] * CONTEXT_LENGTH}, "context"),
        ({"max_new_tokens": CONTEXT_LENGTH}, f"context of {CONTEXT_LENGTH}"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": "4"}, "valid integer (got '4')"),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, "min_new_tokens=9"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_p": 0.0}, "top_p: Input should be greater than 0 (got 0.0)"),
        ({"top_k": 0}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"]}, "tokenizer"),  # the test's checkpoint has none
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"n": 2}, "n"),
        ({"temprature": 0.5}, "temprature"),
        ({"stream": True}, "stream"),
        ({"image_data": ["x"]}, "image_data"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"text": "hello"}, "text"),
        ({"logprob_start_len": 4}, "logprob_start_len"),
    ],
)
def test_bad_requests_are_refused(server: RunningServer, change, message) -> None:
    top_level = {"input_ids", "stream", "image_data", "lora_path", "text"}
    top_level |= {"return_routed_experts", "logprob_start_len"}
    body = {"input_ids": [3, 1, 4], "sampling_params": {"max_new_tokens": 4}}
    for key, value in change.items():
        (body if key in top_level else body["sampling_params"])[key] = value
    reply = server.post("/generate", body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    # AReaL's client shows the reason line of a failed request, not its body.
    assert message in reply.reason
    assert server.generate([3], max_new_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"input_ids": [1]}', "text/plain"),
    ],
)
def test_bad_bodies_are_refused(server: RunningServer, data, content_type) -> None:
    reply = requests.post(
        server.url + "/generate",
        data=data,
        headers={"Content-Type": content_type},
        timeout=60,
    )
    assert reply.status_code == 400 and reply.json()["error"]["message"]


@pytest.mark.parametrize("endpoint", UNSUPPORTED_ENDPOINTS)
def test_unsupported_endpoints_say_so(server: RunningServer, endpoint) -> None:
    reply = server.post(endpoint)
    assert reply.status_code == 501
    assert UNSUPPORTED_ENDPOINTS[endpoint] in reply.json()["error"]["message"]


def test_pause_returns_partial_answers_and_continue_goes_on(
    server: RunningServer, model
) -> None:
    replies = []
    threads = [
        threading.Thread(
            target=lambda i=i: replies.append(
                server.generate([3, i], sampling_seed=i, **LONG).json()
            )
        )
        for i in range(5)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.info()["num_running"] == 5, "five running", 60)
    server.post("/pause_generation").raise_for_status()
    assert server.info()["num_running"] == 0
    assert server.info()["holds"] == ["paused"]
    for thread in threads:
        thread.join(60)
    assert len(replies) == 5
    for reply in replies:
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(reply["output_ids"]) < LONG["max_new_tokens"]

    held = threading.Thread(
        target=lambda: replies.append(server.generate([3], max_new_tokens=2).json())
    )
    held.start()
    wait_until(lambda: server.info()["num_waiting"] == 1, "one waiting", 60)
    server.post("/continue_generation").raise_for_status()
    held.join(60)
    assert len(replies[-1]["output_ids"]) == 2


def test_a_client_that_hangs_up_frees_its_place(server: RunningServer) -> None:
    with pytest.raises(requests.Timeout):
        body = {"input_ids": [3], "sampling_params": LONG}
        requests.post(server.url + "/generate", json=body, timeout=0.2)
    wait_until(lambda: server.info()["num_running"] == 0, "place freed", 60)


def test_memory_can_be_released_and_taken_back(server: RunningServer) -> None:
    before = server.generate([3], max_new_tokens=5, sampling_seed=1).json()
    server.post("/release_memory_occupation").raise_for_status()
    assert server.info()["holds"] == ["memory released"]
    server.post("/resume_memory_occupation", {"tags": ["weights"]}).raise_for_status()
    assert server.info()["holds"] == ["memory released"]
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).raise_for_status()
    after = server.generate([3], max_new_tokens=5, sampling_seed=1).json()
    assert before["output_ids"] == after["output_ids"]


def test_the_prefix_cache_can_be_flushed(server: RunningServer) -> None:
    def num_cached() -> int:
        reply = server.generate([5] * 30, max_new_tokens=1, sampling_seed=1).json()
        return reply["meta_info"]["cached_tokens"]

    server.post("/flush_cache").raise_for_status()
    assert [num_cached(), num_cached()] == [0, 29]
    server.post("/flush_cache").raise_for_status()
    assert num_cached() == 0


def test_sigterm_ends_it_in_time_even_while_busy(model_path) -> None:
    with running_server(model_path) as running:
        pending = threading.Thread(
            target=lambda: replies.append(running.generate([3], **LONG)), daemon=True
        )
        replies: list[requests.Response] = []
        pending.start()
        wait_until(lambda: running.info()["num_running"] == 1, "one running", 60)
        running.process.send_signal(signal.SIGTERM)
        # AReaL kills what is left after five seconds.
        assert running.process.wait(5.0) == 0
        pending.join(60)
        assert replies[0].status_code == 503
        assert "shutting down" in replies[0].text


PARENT = """
import os, subprocess, sys, time
from areal_dta.config.server_options import LocalServerConfig
from areal_dta.rollout_server.server import build_command
config = LocalServerConfig(model_path=sys.argv[1], port=int(sys.argv[2]))
print(subprocess.Popen(build_command(config, os.getpid())).pid, flush=True)
time.sleep(300)
"""


def test_it_ends_with_its_parent(model_path) -> None:
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_path), str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    server_pid = None
    try:
        server_pid = int(parent.stdout.readline())
        wait_until(lambda: is_healthy(port), "server start", START_TIMEOUT_SECONDS)
        parent.kill()
        parent.wait(EXIT_TIMEOUT_SECONDS)
        wait_until(lambda: is_gone(server_pid), "server end", EXIT_TIMEOUT_SECONDS)
    finally:
        parent.kill()
        parent.wait(EXIT_TIMEOUT_SECONDS)
        parent.stdout.close()
        if server_pid is not None and not is_gone(server_pid):
            subprocess.run(["kill", "-9", str(server_pid)], check=False)


def run_server(**options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "areal_dta.rollout_server.server", json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_SECONDS,
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_addresses_beyond_this_machine_are_refused(model_path, host) -> None:
    done = run_server(model_path=str(model_path), host=host)
    assert done.returncode == EXIT_BAD_CONFIG
    assert "allow_remote" in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_has_its_own_exit_code(server, model_path) -> None:
    done = run_server(model_path=str(model_path), port=server.port)
    assert done.returncode == EXIT_PORT_IN_USE
    assert str(server.port) in done.stderr and "Traceback" not in done.stderr


def test_a_missing_model_is_one_line(tmp_path) -> None:
    done = run_server(model_path=str(tmp_path), port=free_port())
    assert done.returncode == EXIT_BAD_CONFIG
    assert str(tmp_path) in done.stderr and "Traceback" not in done.stderr


def test_the_command_line_carries_every_option() -> None:
    config = LocalServerConfig(
        model_path="a b",
        host="::1",
        port=4000,
        allow_remote=True,
        dtype="bfloat16",
        context_length=77,
        max_batch_size=3,
        random_seed=9,
    )
    *_, options, parent = build_command(config, 12)
    assert parse_options(options) == config and parent == "--parent-pid=12"
    default = build_command(LocalServerConfig(), None)[-1]
    assert parse_options(default) == LocalServerConfig()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_path": ""}, "model_path"),
        ({"dtype": "fp32"}, "dtype='fp32'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"port": 70000}, "port=70000"),
        ({"host": "example.org"}, "allow_remote"),
        ({"context_length": 1}, "context_length=1"),
    ],
)
def test_wrong_options_are_named(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        LocalServerConfig(**{"model_path": "x", **change}).validate()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_are_accepted(host) -> None:
    LocalServerConfig(model_path="x", host=host).validate()


def test_unknown_server_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="mem_fraction_static"):
        parse_options({"mem_fraction_static": 0.9})
