"""Generation of the embedded server on a CPU: tokens per second, and of what limit.

    python scripts/bench_generation.py --json generation.json
    python scripts/bench_generation.py --base ../areal_dta-0.1.0     # beside it

Two workloads, driven through the generation thread as the HTTP handlers drive it:

* main: 16 prompts x 8 samples of the main job on the embedded model, all prompts new in
  each round, and weights that change after each (nothing is reused).
* agent: 16 episodes at a time that send their whole history with each call, on random
  weights (6 M parameters): a common system prompt, histories of 2k to 8k tokens, and
  answers of 24.

Each contender runs in processes of its own, and contenders take turns: `cache` (as
configured), `no cache` (`prefix_cache_bytes=0`), and with `--base` an older checkout.
GEMM peak and memory bandwidth are measured in the same processes, one thread. Shares:
`gemm_share` are the FLOPs of the model's matrices for the tokens that had to be
computed, over seconds times the peak; `bandwidth_share` are the bytes of weights and of
the K/V of each row, over seconds of decoding times the bandwidth (rows that share a
prefix read it once, so that this may exceed 1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = ("base", "no cache", "cache")
CACHE_BYTES = 512 * 1024**2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--base", type=Path, help="checkout of an older version")
    add("--workloads", default="main,agent", help="comma separated")
    add("--repeats", type=int, default=3, help="processes per contender")
    add("--rounds", type=int, default=4, help="batches of the main job per process")
    add("--episodes", type=int, default=16)
    add("--calls", type=int, default=3, help="per episode")
    add("--profile", action="store_true", help="print where the time goes")
    add("--json", type=Path, metavar="FILE")
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class Server:
    """A generation thread of this version, or of 0.1.0."""

    def __init__(self, model: Any, cache_bytes: int | None) -> None:
        limits = {"max_batch_size": 128, "max_cached_tokens": 262_144}
        if cache_bytes is None:
            from areal_dta.rollout.local import generation, sampling
            from areal_dta.rollout.local import worker as thread

            limits["max_prefill_tokens"] = 16_384
            Thread, Task = thread.GenerationWorker, generation.GenerationTask
        else:
            from areal_dta.rollout_server import (
                answers,
                generation,
                generation_thread,
                sampling,
            )

            limits |= {"max_prefill_tokens": 512, "prefix_cache_bytes": cache_bytes}
            Thread, Task = generation_thread.GenerationThread, answers.GenerationTask
        self.Task, self.RowSampling = Task, sampling.RowSampling
        self.generator = generation.BatchGenerator(model, **limits)
        self.thread = Thread(self.generator, 4096)
        self.num_steps = 0
        step = self.generator.step

        def counted() -> Any:
            self.num_steps += 1
            return step()

        self.generator.step = counted
        self.thread.start()

    def submit(self, prompt: Sequence[int], max_new_tokens: int, seed: str) -> Any:
        return self.thread.submit(
            self.Task(
                prompt=tuple(prompt),
                sampling=self.RowSampling(1.0, 1.0, -1),
                max_new_tokens=max_new_tokens,
                min_new_tokens=0,
                stop_token_ids=self.stops,
                stop_strings=(),
                seed=seed,
            )
        )

    stops: frozenset[int] = frozenset()


def main_job(server: Server, args: argparse.Namespace) -> Callable[[], list[Any]]:
    """Prepare rounds of 16 prompts x 8 samples, each submitted at once."""
    from transformers import AutoTokenizer

    from areal_dta.embedded import SYSTEM_PROMPT, generate_problems, tiny_model_path

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    server.stops = frozenset({tokenizer.eos_token_id})
    prompts = []
    for problem in generate_problems(16 * args.rounds, seed=1, split="train"):
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": problem["question"]},
        ]
        prompts.append(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        )

    def run() -> list[Any]:
        answers = []
        for first in range(0, len(prompts), 16):
            futures = [
                server.submit(prompt, 48, f"{first}/{i}/{j}")
                for i, prompt in enumerate(prompts[first : first + 16])
                for j in range(8)
            ]
            answers += [future.result() for future in futures]
            server.thread.run_exclusively(lambda: None).result()
        return answers

    return run


def agent(server: Server, args: argparse.Namespace) -> Callable[[], list[Any]]:
    """Prepare episodes that go on as soon as they are answered; four per task."""
    rng = random.Random(0)

    def text(size: int) -> list[int]:
        return [rng.randrange(3, 512) for _ in range(size)]

    trunk = text(2000)
    tasks = [text(400) for _ in range(-(-args.episodes // 4))]
    answers: list[Any] = []
    done = threading.Semaphore(0)

    def play(episode: int) -> None:
        history = trunk + tasks[episode // 4]
        own = random.Random(episode)
        for call in range(args.calls):
            answer = server.submit(history, 24, f"{episode}/{call}").result()
            answers.append(answer)
            history = history + answer.tokens
            size = own.choice([100, 300, 1200])
            history += [own.randrange(3, 512) for _ in range(size)]
        done.release()

    def run() -> list[Any]:
        for episode in range(args.episodes):
            threading.Thread(target=play, args=(episode,), daemon=True).start()
        for _ in range(args.episodes):
            done.acquire()
        return answers

    return run


WORKLOADS: dict[str, Callable[..., Callable[[], list[Any]]]] = {
    "main": main_job,
    "agent": agent,
}


def limits() -> dict[str, float]:
    """Measure one core: GEMM in FLOP/s, reading in bytes/s."""
    import torch

    a, b = torch.randn(2, 1536, 1536)
    big = torch.randn(32 * 1024**2)

    def best(call: Callable[[], Any]) -> float:
        found = []
        for _ in range(5):
            started = time.process_time()
            call()
            found.append(time.process_time() - started)
        return min(found)

    return {
        "gemm_flops_per_second": 2 * 1536**3 / best(lambda: a @ b),
        "bytes_per_second": big.numel() * 4 / best(big.sum),
    }


def agent_model() -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=16_384,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Run one workload with one contender in this process."""
    import torch

    torch.set_num_threads(1)
    contender, workload = args.child.split("/")
    if workload == "main":
        from transformers import AutoModelForCausalLM

        from areal_dta.embedded import tiny_model_path

        model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
        model = model.eval().requires_grad_(False)
    else:
        model = agent_model()
    cache_bytes = {"base": None, "no cache": 0, "cache": CACHE_BYTES}[contender]
    server = Server(model, cache_bytes)
    server.submit([5, 6, 7], 3, "warm-up").result()
    server.num_steps = 0
    before = limits()
    run = WORKLOADS[workload](server, args)
    wall, cpu = time.perf_counter(), time.process_time()
    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            answers = run()
        averages = profiler.key_averages()
        print(averages.table(sort_by="self_cpu_time_total", row_limit=30), flush=True)
    else:
        answers = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = limits()
    return account(model, server, answers, wall, cpu) | {
        key: max(before[key], after[key]) for key in before
    }


def account(
    model: Any, server: Server, answers: list[Any], wall: float, cpu: float
) -> dict[str, Any]:
    """Count tokens, FLOPs and bytes of a run."""
    config = model.config
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2)
    vocabulary = config.vocab_size * config.hidden_size
    prompt = sum(len(a.task.prompt) for a in answers)
    cached = sum(getattr(a, "num_cached_tokens", 0) for a in answers)
    new = sum(len(a.tokens) for a in answers)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    read = sum(
        kv * (len(a.task.prompt) + i) for a in answers for i in range(len(a.tokens))
    )
    prefilled = prompt - cached - len(answers)
    if not hasattr(answers[0], "num_cached_tokens"):
        # 0.1.0 prefills equal prompts once when they are admitted together.
        is_grouped = len(answers) > 8 * len({a.task.prompt for a in answers}) - 1
        prefilled //= 8 if is_grouped else 1
    return {
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "num_steps": server.num_steps,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "answer_tokens": new,
        "tokens_per_cpu_second": new / cpu,
        "flops": 2 * (matrices - vocabulary) * (prefilled + new) + 2 * vocabulary * new,
        "bytes": 4 * matrices * server.num_steps + read,
    }


def run_child(args: argparse.Namespace, contender: str, workload: str) -> Any:
    root = args.base if contender == "base" else ROOT
    env = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, __file__, "--child", f"{contender}/{workload}"]
    for name in ("rounds", "episodes", "calls"):
        command.append(f"--{name}={getattr(args, name)}")
    if args.profile:
        command.append("--profile")
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{contender}, {workload}: failed with {done.returncode}")
    *shown, last = done.stdout.strip().splitlines()
    print("\n".join(shown), end="\n" if shown else "", file=sys.stderr)
    return json.loads(last)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    peak, width = found["gemm_flops_per_second"], found["bytes_per_second"]
    found["hit_rate"] = found["cached_tokens"] / found["prompt_tokens"]
    found["gemm_share"] = found["flops"] / found["cpu_seconds"] / peak
    found["bandwidth_share"] = found["bytes"] / found["cpu_seconds"] / width
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.child:
        print(json.dumps(child(args)))
        return 0
    contenders = [c for c in CONTENDERS if c != "base" or args.base]
    report: dict[str, Any] = {"command": sys.argv, "cpus": os.cpu_count()}
    print("| workload | server | wall s | CPU s | tokens / CPU s | hit rate | GEMM |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for workload in args.workloads.split(","):
        runs: dict[str, list[Any]] = {contender: [] for contender in contenders}
        for _ in range(args.repeats):
            for contender in contenders:
                runs[contender].append(run_child(args, contender, workload))
        report[workload] = {c: {**summary(r), "runs": r} for c, r in runs.items()}
        for contender in contenders:
            found = report[workload][contender]
            print(
                f"| {workload} | {contender} | {found['wall_seconds']:.2f} "
                f"| {found['cpu_seconds']:.2f} | {found['tokens_per_cpu_second']:.0f} "
                f"| {found['hit_rate']:.3f} | {found['gemm_share']:.0%} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
