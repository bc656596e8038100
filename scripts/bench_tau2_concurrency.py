"""Measure whether many tau2 episodes at a time keep the event loop free.

    python scripts/bench_tau2_concurrency.py --domain telecom airline --episodes 64

All episodes run at once in one process, as in a rollout worker. Each model call is an
HTTP request with the whole conversation to a server (in a process of its own) that
waits and answers. Then the reference solution is followed, so tools and evaluator have
real work. Meanwhile a task wakes up every 10 ms and records how late it is: every other
episode, and AReaL's own requests, would be delayed as much.

Exit codes: 0 done, 1 the 99th percentile is above --limit-ms, 2 tau2 is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from aiohttp import web

_TICK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one domain."""

    domain: str
    episodes: int
    seconds: float
    model_calls: int
    mean_reward: float
    delay_p50_ms: float
    delay_p99_ms: float
    delay_max_ms: float


async def measure(domain_name: str, num_episodes: int, url: str) -> Result:
    from recipes.chat import ChatClient, ChatOptions
    from recipes.tau2.domains import find_domain, find_task, task_ids
    from recipes.tau2.options import Tau2Options
    from recipes.tau2.play.episode import run_episode
    from recipes.tau2.play.policies import ChatPolicy, GoldPolicy, GoldScript
    from recipes.tau2.play.users import GoldUser
    from recipes.tau2.workers.environments import EnvironmentPool
    from recipes.tau2.workers.rewards import RewardPool

    domain = find_domain(domain_name)
    ids = task_ids(domain_name, "train")
    client = ChatClient(ChatOptions(base_url=url), "the stub", "-")

    class GoldOverHttp:
        def __init__(self, script: GoldScript) -> None:
            self.http = ChatPolicy(client)
            self.gold = GoldPolicy(script, domain.solo)

        async def reply(self, messages, tools):
            await self.http.reply(messages, tools)
            return await self.gold.reply(messages, tools)

    async def one(index: int, pool: RewardPool) -> tuple[float, int]:
        task_id = ids[index % len(ids)]
        script = GoldScript(find_task(domain_name, task_id))
        make_user = None if domain.solo else lambda task: GoldUser(script)
        policy = GoldOverHttp(script)
        options = Tau2Options(max_steps=300)
        episode = await run_episode(
            domain, task_id, policy, make_user, options, environments
        )
        reward = await pool.score(episode.scoring_request())
        return reward.value, episode.num_turns

    delays: list[float] = []
    with RewardPool(2) as pool, EnvironmentPool(2) as environments:
        await one(0, pool)  # imports, caches
        ticking = asyncio.create_task(_tick(delays))
        start = time.perf_counter()
        done = await asyncio.gather(*(one(i, pool) for i in range(num_episodes)))
        seconds = time.perf_counter() - start
        ticking.cancel()
    await client.close()
    p50, p99, maximum = np.percentile(np.array(delays) * 1000, [50, 99, 100])
    return Result(
        domain=domain_name,
        episodes=num_episodes,
        seconds=seconds,
        model_calls=sum(turns for _, turns in done),
        mean_reward=float(np.mean([reward for reward, _ in done])),
        delay_p50_ms=float(p50),
        delay_p99_ms=float(p99),
        delay_max_ms=float(maximum),
    )


async def _tick(delays: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK_SECONDS)
        delays.append(time.perf_counter() - before - _TICK_SECONDS)


def serve(latency_seconds: float) -> None:
    """Run the stub server; it prints its port, and ends with its parent."""

    async def answer(request: web.Request) -> web.Response:
        await request.json()
        await asyncio.sleep(latency_seconds)
        message = {"role": "assistant", "content": "Yes."}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "stub"}
        return web.json_response({**head, "choices": [choice]})

    async def run() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(0.5)

    asyncio.run(run())


@contextmanager
def stub_server(latency_seconds: float):
    command = [sys.executable, __file__, "--serve", str(latency_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()


def header() -> str:
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}\n\n"
        "| domain | episodes | seconds | model calls | reward "
        "| loop delay p50 / p99 / max, ms |\n"
        "|---|---:|---:|---:|---:|---:|"
    )


def line(r: Result) -> str:
    delays = f"{r.delay_p50_ms:.1f} / {r.delay_p99_ms:.1f} / {r.delay_max_ms:.0f}"
    return (
        f"| {r.domain} | {r.episodes} | {r.seconds:.1f} | {r.model_calls} "
        f"| {r.mean_reward:.2f} | {delays} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--domain", nargs="+", default=["telecom", "airline"])
    parser.add_argument("--episodes", type=int, default=64, help="at a time")
    parser.add_argument("--latency", type=float, default=0.2, help="s, of a model call")
    parser.add_argument("--limit-ms", type=float, default=250.0, help="of p99")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return 0
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from recipes.tau2.domains import MissingTau2Error, import_tau2

    try:
        import_tau2()
    except MissingTau2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with stub_server(args.latency) as url:
        results = []
        print(header(), flush=True)
        for domain in args.domain:
            results.append(asyncio.run(measure(domain, args.episodes, url)))
            print(line(results[-1]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    return int(any(r.delay_p99_ms > args.limit_ms for r in results))


if __name__ == "__main__":
    sys.exit(main())
