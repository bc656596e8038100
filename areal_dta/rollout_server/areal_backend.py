"""AReaL's client of the local rollout server: start, requests, health, end.

AReaL's `RolloutController` creates a `LocalEngine` in each rollout worker; the worker
launches one server and is its only client. Everything AReaL does with SGLang (requests,
interruption, weight updates from disk) goes through `SGLangBackend`; `LocalBackend`
adds the draw key of an answer and the run's token to its requests.

Servers listen on loopback: a worker and its server share a machine, also in runs over
several machines. Set `host=auto allow_remote=true` only if other machines must reach a
server, because Ray has placed evaluation workers or agent proxies there.
"""

import hashlib
import itertools
import os
import subprocess
import time
from array import array
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from functools import cache
from typing import Any

import ray
import requests
from areal.api import (
    InferenceEngine,
    LocalInfServerInfo,
    ModelRequest,
    RolloutWorkflow,
    Scheduler,
    WeightUpdateMeta,
)
from areal.api.cli_args import InferenceEngineConfig
from areal.api.io_struct import (
    HttpRequest,
    WeightUpdateRequests,
)
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.infra import RolloutController, workflow_context
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
from areal.utils.network import find_free_ports, format_hostport, gethostip

from areal_dta.areal_fixes.rollout_workers import (
    PromptlyResumed,
    keep_connections,
    remember_versions,
)
from areal_dta.collector.prompt_issuer import PROMPT_ID_KEY
from areal_dta.config import lora
from areal_dta.config.server_options import TOKEN_VARIABLE, LocalServerConfig
from areal_dta.rollout_server.server import (
    EXIT_PORT_IN_USE,
    build_command,
    parse_options,
)

_PORT_ATTEMPTS = 3
_HEALTH_POLL_SECONDS = 0.2
_HEALTH_TIMEOUT_SECONDS = 30.0
_WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")
_PROMPT_LENGTH_KEY = "areal_dta_prompt_length"
_DRAW_KEY = "areal_dta_draw_key"
# Statistics of the servers since the last step, and what they count since their start.
_SERVER_STATS = {
    "rollout/prompt_tokens": "num_prompt_tokens",
    "rollout/cached_prompt_tokens": "num_cached_tokens",
}


# -- Draw keys: which numbers an answer is sampled with --
#
# A server samples an answer from the stream that the run's seed and the answer's *draw
# key* name, so which server answers, when, and beside which other requests makes no
# difference. AReaL's client sends nothing that tells the samples of a prompt apart, so
# `LocalBackend` sends the key:
#
# - A prompt of our data loader has an id, which a resumed run continues. Its key is
#   (prompt id, try, sample, turn); the sample is the index in the group, the turn
#   counts the calls of one sample.
# - Requests of other data loaders, of evaluations and of agent proxies, which run in
#   another process, are told by their tokens: (purpose, weight version, tokens,
#   occurrence). Equal requests of two such clients at one version share a stream.
#
# An interrupted answer keeps its key, and goes on behind the numbers that it has used.

# (prompt, counter of its samples), and (sample, counter of its turns)
_group: ContextVar[tuple[str, Iterator[int]] | None] = ContextVar("group", default=None)
_sample: ContextVar[tuple[str, Iterator[int]] | None] = ContextVar(
    "sample", default=None
)


def prompt_digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


class KeyedGroup(RolloutWorkflow):
    """Workflow of a prompt: takes its id out of the data, for the draws."""

    def __init__(self, workflow: RolloutWorkflow) -> None:
        self._workflow = workflow

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        prompt_id = data.get(PROMPT_ID_KEY)
        _group.set(None if prompt_id is None else (prompt_id, itertools.count()))
        data = {key: value for key, value in data.items() if key != PROMPT_ID_KEY}
        return await self._workflow.arun_episode(engine, data)


class KeyedSample(RolloutWorkflow):
    """Workflow of one sample of a prompt, below `KeyedGroup`.

    AReaL starts the samples of a group in order, each in a task with its own context.
    """

    def __init__(self, workflow: RolloutWorkflow) -> None:
        self._workflow = workflow

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        sample = None
        if group := _group.get():
            sample = f"prompt/{group[0]}/{next(group[1])}", itertools.count()
        _sample.set(sample)
        return await self._workflow.arun_episode(engine, data)


class DrawKeys:
    """Draw keys of one client."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._occurrences: dict[str, Iterator[int]] = {}

    def next(self, prompt: Sequence[int], version: int) -> str:
        """Return the key of a new answer to `prompt`."""
        if sample := _sample.get():
            return f"{sample[0]}/{next(sample[1])}"
        if version != self._version:  # so that the table does not grow for ever
            self._version, self._occurrences = version, {}
        purpose = "eval" if workflow_context.get().is_eval else "train"
        key = f"{purpose}/{version}/{prompt_digest(prompt)}"
        occurrence = next(self._occurrences.setdefault(key, itertools.count()))
        return f"{key}/{occurrence}"


# -- The backend, the client and the controller --


class ServerExitedError(RuntimeError):
    """The server ended before it was ready."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(
            f"the local rollout server ended with exit code {exit_code} before it was "
            "ready; its own message is in the log of the rollout worker."
        )
        self.exit_code = exit_code


class LocalBackend(SGLangBackend):
    """Backend with SGLang's requests and this package's server process."""

    def __init__(self) -> None:
        self._draw_keys = DrawKeys()

    def build_generation_request(
        self, req: ModelRequest, with_lora: bool, version: int
    ) -> HttpRequest:
        lora.check_request(with_lora)
        request = super().build_generation_request(req, with_lora, version)
        # AReaL does not send min_new_tokens, and after an interruption it resends the
        # tokens generated so far as part of the prompt. To count them, the length of
        # the original prompt is kept in the request's metadata (a private copy).
        if _DRAW_KEY not in req.metadata:
            req.metadata[_DRAW_KEY] = self._draw_keys.next(req.input_ids, version)
            req.metadata[_PROMPT_LENGTH_KEY] = len(req.input_ids)
        num_generated = len(req.input_ids) - req.metadata[_PROMPT_LENGTH_KEY]
        request.payload["sampling_params"] |= {
            "min_new_tokens": max(0, req.gconfig.min_new_tokens - num_generated),
            "draw_key": req.metadata[_DRAW_KEY],
            "num_drawn": num_generated,
        }
        return _with_token(request)

    def build_score_request(self, *args: Any, **kwargs: Any) -> HttpRequest:
        return _with_token(super().build_score_request(*args, **kwargs))

    def build_disk_weight_update_requests(
        self, meta: WeightUpdateMeta
    ) -> WeightUpdateRequests:
        update = super().build_disk_weight_update_requests(meta)
        update.requests = [_with_token(request) for request in update.requests]
        return update

    def get_pause_request(self) -> HttpRequest:
        return _with_token(super().get_pause_request())

    def get_resume_request(self) -> HttpRequest:
        return _with_token(super().get_resume_request())

    def get_offload_request(self) -> HttpRequest:
        return _with_token(super().get_offload_request())

    def get_onload_request(self, tags: list[str] | None = None) -> HttpRequest:
        return _with_token(super().get_onload_request(tags))

    def launch_server(self, server_args: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Start the server process; it ends with this one.

        Raises:
            ValueError: `server_args` do not make up a valid `LocalServerConfig`.
        """
        config = parse_options(server_args)
        config.validate()
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(config.num_threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        return subprocess.Popen(
            build_command(config, os.getpid()), env=env, stdin=subprocess.DEVNULL
        )


@cache
def _repair_client() -> None:
    """Repair AReaL's client, once in this process."""
    remember_versions()
    keep_connections()


def _with_token(request: HttpRequest) -> HttpRequest:
    # Sent in the body: AReaL's client sends no extra headers, and logs URLs.
    if token := os.environ.get(TOKEN_VARIABLE):
        request.payload["token"] = token
    return request


class LocalInfEngine(PromptlyResumed):
    """AReaL's client, with a server address of our choice and watched start-up."""

    def _resolve_workflow(
        self,
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
        proxy_addr: str | None = None,
    ) -> RolloutWorkflow:
        """Resolve as AReaL does, with draw keys for a prompt and for its samples."""
        resolved = super()._resolve_workflow(
            workflow, workflow_kwargs, group_size=1, proxy_addr=proxy_addr
        )
        group: RolloutWorkflow = KeyedSample(resolved)
        if group_size > 1:
            group = GroupedRolloutWorkflow(group, group_size, self.logger)
        return KeyedGroup(group)

    def launch_server(self, server_args: dict[str, Any]) -> LocalInfServerInfo:
        """Start a server on this machine and wait until it serves.

        Raises:
            ValueError: wrong options.
            ServerExitedError: the server ended instead.
            TimeoutError: it was not ready within `config.setup_timeout` seconds.
        """
        config = parse_options(server_args)
        if config.host == "auto":
            config.host = gethostip()
        fixed_port = config.port
        for attempt in range(_PORT_ATTEMPTS):
            config.port = fixed_port or find_free_ports(1)[0]
            try:
                return self._launch_once(config)
            except ServerExitedError as error:
                last = attempt == _PORT_ATTEMPTS - 1 or fixed_port
                if error.exit_code != EXIT_PORT_IN_USE or last:
                    raise
        raise AssertionError("unreachable")

    def check_health(self, base_url: str) -> bool:
        """Ask the server directly, ignoring proxies that the environment names."""
        request = self.backend.get_health_check_request()
        try:
            return self._get(f"{base_url}{request.endpoint}").status_code == 200
        except requests.RequestException:
            return False

    @staticmethod
    def _get(url: str) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            return session.get(url, timeout=_HEALTH_TIMEOUT_SECONDS)

    def server_infos(self) -> list[dict[str, Any]]:
        """Return the state of the servers started here, but for those that are gone."""
        infos = []
        for server in self.local_server_processes:
            address = format_hostport(server.host, server.port)
            try:
                infos.append(self._get(f"http://{address}/get_server_info").json())
            except requests.RequestException:
                continue
        return infos

    def _is_ready(self, base_url: str, process: subprocess.Popen[bytes] | None) -> bool:
        """Return whether the server is healthy and is `process`, not another one."""
        if not self.check_health(base_url):
            return False
        if process is None:
            return True
        try:
            info = self._get(f"{base_url}/get_server_info").json()
            return bool(info["pid"] == process.pid)
        except (requests.RequestException, KeyError, TypeError):
            return False

    def _launch_once(self, config: LocalServerConfig) -> LocalInfServerInfo:
        process = self.backend.launch_server(asdict(config))
        host = gethostip() if config.host in _WILDCARD_HOSTS else config.host
        info = LocalInfServerInfo(host=host, port=config.port, process=process)
        try:
            self._wait_for_server(format_hostport(host, config.port), process)
        except BaseException:
            self._shutdown_one_server(info)
            raise
        self.local_server_processes.append(info)
        if ray.is_initialized():  # a process handle cannot be sent through Ray
            return LocalInfServerInfo(host=host, port=config.port, process=None)
        return info

    def _wait_for_server(
        self, address: str, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        deadline = time.monotonic() + self.config.setup_timeout
        while not self._is_ready(f"http://{address}", process):
            if process is not None and process.poll() is not None:
                raise ServerExitedError(process.returncode)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the rollout server at {address} was not ready within "
                    f"{self.config.setup_timeout:.0f} s (rollout.setup_timeout)."
                )
            time.sleep(_HEALTH_POLL_SECONDS)


class LocalController(RolloutController):
    """AReaL's controller, with the hit rate of the servers' prefix caches."""

    def export_stats(self) -> dict[str, float]:
        """Return AReaL's statistics and ``rollout/prefix_hit_rate`` since last time."""
        stats = super().export_stats()
        # Both are means over the servers.
        num_prompt, num_cached = (stats.get(key, 0.0) for key in _SERVER_STATS)
        if num_prompt:
            stats["rollout/prefix_hit_rate"] = num_cached / num_prompt
        return stats


class LocalEngine(RemoteSGLangEngine):
    """AReaL's rollout engine for `rollout.backend=local:dN`."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config)
        _repair_client()
        self._engine = LocalInfEngine(config, LocalBackend())
        self._counted = dict.fromkeys(_SERVER_STATS, 0)

    @classmethod
    def as_controller(
        cls, config: InferenceEngineConfig, scheduler: Scheduler
    ) -> RolloutController:
        if config._version != "v1":
            raise ValueError(
                f"rollout._version={config._version}; the local rollout backend works "
                "with AReaL's v1 controller only."
            )
        return LocalController(cls, config=config, scheduler=scheduler)

    def export_stats(self) -> dict[str, float]:
        """Return AReaL's statistics and those of the servers started here.

        The servers are asked because requests of agents come from other processes.
        """
        stats: dict[str, float] = super().export_stats()
        infos = self._engine.server_infos()
        for key, name in _SERVER_STATS.items():
            total = sum(info[name] for info in infos)
            if infos and total >= self._counted[key]:
                stats[key] = total - self._counted[key]
                stats[f"{key}__count"] = 1
                self._counted[key] = total
        return stats
