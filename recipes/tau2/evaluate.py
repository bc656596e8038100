"""Play a split of a tau2 domain and report pass^1..k and the floor of doing nothing.

    python -m recipes.tau2.evaluate --domain telecom_solo --split test --trials 4 \
        --policy http://127.0.0.1:8000/v1 --model Qwen3-1.7B
    python -m recipes.tau2.evaluate --domain airline --policy gold

The policy is an OpenAI-compatible URL or a built-in script: `gold` (the reference
solution, an upper bound) or `refuse` (declines politely). pass^k is the probability
that all of k trials of a task succeed, averaged over tasks (arXiv 2406.12045). Some
tasks ask for nothing, so doing nothing has a score: the floor.

Exit codes: 0 done, 1 a server failed, 2 an argument is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from recipes.chat import ChatOptions, ServerError
from recipes.tau2.domains import DOMAINS, find_domain, import_tau2, task_ids
from recipes.tau2.options import Tau2Options, UserOptions

if TYPE_CHECKING:
    from recipes.tau2.evaluation import Report, Settings

SCRIPTS = ("gold", "refuse")


def print_report(result: Report) -> None:
    table = Table(title=f"{result.domain}: {result.num_tasks} tasks")
    for title in ("policy", "trials", *(f"pass^{k}" for k in result.pass_hat)):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for title in ("do-nothing floor", "turns", "not judged"):
        table.add_column(title, justify="right")
    table.add_row(
        result.policy,
        str(result.trials),
        *(f"{value:.3f}" for value in result.pass_hat.values()),
        f"{result.floor:.3f}",
        f"{result.mean_turns:.1f}",
        str(result.num_unjudged),
    )
    console = Console()
    console.print(table)
    ends = {**result.terminations, **result.problems}
    console.print(
        "ends: " + ", ".join(f"{name} {count}" for name, count in ends.items())
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.tau2.evaluate",
        description="Play a split of a tau2 domain and report pass^k.",
    )
    add = parser.add_argument
    add("--domain", required=True, choices=list(DOMAINS))
    add("--split", default="test", help="train, test, or another of tau2's")
    add("--policy", required=True, help=f"{', '.join(SCRIPTS)}, or a URL ending in /v1")
    add("--model", default="default", help="its name on the policy's server")
    add("--api-key", default="none", help="for the policy's server")
    add("--trials", type=int, default=1, help="of each task; k of pass^k")
    add("--concurrency", type=int, default=16, help="episodes at a time")
    add("--max-tasks", type=int, help="only the first so many")
    add("--max-steps", type=int, default=100, help="of an episode")
    add("--max-tokens", type=int, default=1024, help="of one message of the model")
    add("--temperature", type=float, default=0.6)
    add("--thinking", action="store_true", help="let the model think first")
    add("--user", default="rule", help="rule, or the URL of a user model")
    add("--user-model", default="default", help="its name on the user's server")
    add("--timeout-seconds", type=float, default=600.0, help="of one request")
    add("--retries", type=int, default=3, help="of one request")
    add("--reward-processes", type=int, default=2)
    add("--json", type=Path, metavar="FILE", help="write the report there as well")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> Settings:
    """Convert the arguments to settings.

    Raises:
        ValueError: an argument is wrong, or tau2 is not installed.
    """
    for name in ("trials", "concurrency", "max_tasks"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}; expected at least 1")
    chat = None
    if args.policy not in SCRIPTS:
        _check_url("--policy", args.policy, SCRIPTS)
        chat = ChatOptions(
            base_url=args.policy,
            model=args.model,
            api_key=args.api_key,
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            timeout_seconds=args.timeout_seconds,
            max_retries=args.retries,
            extra_body={"chat_template_kwargs": {"enable_thinking": args.thinking}},
        )
    user = UserOptions(kind="rule")
    if args.user != "rule":
        _check_url("--user", args.user, ("rule",))
        user = UserOptions(
            kind="llm",
            base_url=args.user,
            model=args.user_model,
            timeout_seconds=args.timeout_seconds,
            max_retries=args.retries,
        )
    options = Tau2Options(
        domain=args.domain,
        user=user,
        max_steps=args.max_steps,
        reward_processes=args.reward_processes,
    )
    options.validate()
    import_tau2()  # or say that it is missing
    from recipes.tau2.evaluation import Settings

    return Settings(
        domain=find_domain(args.domain),
        task_ids=task_ids(args.domain, args.split)[: args.max_tasks],
        policy=args.policy,
        options=options,
        trials=args.trials,
        concurrency=args.concurrency,
        chat=chat,
    )


def _check_url(name: str, value: str, others: Sequence[str]) -> None:
    if not value.startswith(("http://", "https://")):
        raise ValueError(
            f"{name} {value!r}; expected {', '.join(others)}, or a URL such as "
            "http://127.0.0.1:8000/v1"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        settings = settings_of(args)
        from recipes.tau2.evaluation import evaluate

        result = asyncio.run(evaluate(settings))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ServerError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_report(result)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
