"""Write the tables of README.md and docs/ from the committed JSON of the benchmarks.

    python scripts/doc_tables.py            # --check: only compare

A table stands between ``<!-- table: NAME [FILE] -->`` and ``<!-- end -->``. Numbers in
running text are listed in docs/benchmarks/claims.yaml, with where they come from; both
are compared by tests/scripts/test_documented_numbers.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.dispatch_table import Measured, Simulated, measured_table, simulated_table
from bench.e2e_report import table as end_to_end_table
from bench.table import markdown_table, workload_section
from bench_collector import Row
from bench_collector import table as collector_table
from bench_long import table as long_table
from bench_memory import table as memory_table
from inspect_accuracy import table as inspect_table

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "benchmarks"
_BLOCK = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_NAMES = ("name", "variant", "method", "search")
FIRST_STEPS, LAST_STEPS = 5, 10

LABELS = {
    "dense": "dense, one sequence at a time",
    "dense_lean": "dense, logits at loss positions only",
    "dense_ckpt": "dense with activation checkpointing",
    "packed": "whole tree in one masked block",
    "dfs": "node by node, recomputing (the paper's method)",
    "dta": "**areal_dta**",
}


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def find(name: str) -> Any:
    """Return a value of a file: ``file.json workloads[tau2-airline].source``.

    In brackets stands an index, the name of an entry (a value of one of _NAMES), or
    conditions ``key=value``, joined by ``&``.
    """
    file, _, path = name.partition(" ")
    value = load(file)
    for key, selector in re.findall(r"([\w-]+)|\[([^\]]+)\]", path):
        if key:
            value = value[key]
        elif re.fullmatch(r"-?\d+", selector):
            value = value[int(selector)]
        else:
            (value,) = [entry for entry in value if _is_selected(entry, selector)]
    return value


def _is_selected(entry: dict[str, Any], selector: str) -> bool:
    if "=" not in selector:
        return selector in (entry.get(key) for key in _NAMES)
    pairs = [condition.split("=") for condition in selector.split("&")]
    return all(str(entry[key]) == value for key, value in pairs)


def headline() -> str:
    """Format the results on recorded episodes, without the columns for experts."""
    workload = find("cpu-tau2-airline.json workloads[tau2-airline]")
    rows = []
    for m in workload["measurements"]:
        if m["variant"] not in LABELS:
            continue
        bold = "**" if m["variant"] == "dta" else ""
        error = m["gradient_error"]
        rows.append(
            [
                LABELS[m["variant"]],
                f"{m['median_seconds']:.1f}",
                f"{bold}{m['ratio']:.2f}{bold}",
                f"{m['bound']:.1f}",
                f"{m['peak_bytes'] / 2**20:,.0f} MiB",
                f"{error:.0e}" if error else "-",
            ]
        )
    titles = "variant;CPU seconds;ratio to dense;FLOP bound;peak memory;gradient error"
    return markdown_table(titles.split(";"), rows)


def other_work() -> str:
    """Format ratios to dense on other work."""
    rows = []
    for label, name in {
        "τ²-bench telecom solo": "cpu-tau2-telecom-solo.json workloads[0]",
        "prompt of 128, 16 answers of 16": "cpu-grpo-short.json workloads[0]",
        "... of 64": "cpu-grpo-short.json workloads[1]",
        "... of 256": "cpu-grpo-short.json workloads[2]",
        "... of 1,024": "cpu-grpo-short.json workloads[3]",
        "8 unrelated sequences": "cpu-no-sharing.json workloads[0]",
    }.items():
        dfs, dta = (find(f"{name}.measurements[{v}]") for v in ("dfs", "dta"))
        cells = dfs["ratio"], dta["ratio"], dta["bound"]
        rows.append([label, *(f"{cell:.2f}" for cell in cells)])
    titles = ["work", "node by node", "**areal_dta**", "FLOP bound"]
    return markdown_table(titles, rows)


def ends_of(run: dict[str, Any]) -> tuple[float, float]:
    """Return the mean of a curve's first steps, and of its last."""
    first, last = run["values"][:FIRST_STEPS], run["values"][-LAST_STEPS:]
    return sum(first) / len(first), sum(last) / len(last)


def rewards() -> str:
    """Format how much the main job learns, by seed."""
    rows = []
    for run in load("rewards.json")["runs"]:
        if run["config"] == "gsm8k_grpo.yaml":
            first, last = ends_of(run)
            twin = "" if run["backend"].startswith("dta") else ", dense twin"
            cells = f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}"
            rows.append([f"{run['seed']}{twin}", *cells])
    titles = [f"first {FIRST_STEPS} steps", f"last {LAST_STEPS}", "rise"]
    return markdown_table(["seed", *titles], rows)


def recipes() -> str:
    """Format what runs without a GPU, and what it learns."""
    calculator, tau2 = (
        f"[recipe](../recipes/{name})" for name in ("gsm8k_calculator", "tau2")
    )
    what = {
        "gsm8k_grpo.yaml": "GRPO on arithmetic: the main job",
        "gsm8k_ppo.yaml": "PPO: a critic, and a KL term to a reference, all on trees",
        "gsm8k_sft.yaml": "supervised fine-tuning on worked solutions",
        "gsm8k_dpo.yaml": "DPO on right and wrong answers",
        "gsm8k_rw.yaml": "a reward model on the same pairs",
        "gsm8k_calculator.yaml": f"an agent that calls a calculator ({calculator})",
        "tau2_smoke.yaml": f"a τ²-bench agent, with `.[tau2]` ({tau2})",
    }
    runs = {r["config"]: r for r in reversed(load("rewards.json")["runs"])}
    rows = []
    for config, text in what.items():
        cell = "the untrained model mostly fails" if "tau2" in config else "-"
        if config in runs:
            run = runs[config]
            first, last = ends_of(run)
            steps = len(run["values"])
            cell = f"{run['metric']} {first:.3f} → {last:.3f}, {steps} steps"
        rows.append([f"`{config}`", text, cell])
    titles = ["`--config`", "what", f"mean of the first {FIRST_STEPS} steps → last 10"]
    return markdown_table(titles, rows, left=(0, 1, 2))


def executor(file: str) -> str:
    """Format a file of bench_executor.py as that prints it, one section per work."""
    return "\n".join(workload_section(w) for w in load(file)["workloads"])


def paper() -> str:
    """Format our ratios beside the paper's."""
    of = "cpu-tau2-airline.json workloads[0].measurements[{}].{}"

    def ours(one: str, other: str, key: str = "median_seconds") -> str:
        return f"{find(of.format(one, key)) / find(of.format(other, key)):.1f}"

    workload = find("cpu-tau2-airline.json workloads[0]")
    sharing = workload["num_sequence_tokens"] / workload["num_tree_tokens"]
    simulated = [s for s in load("dispatch.json")["simulated"] if s["num_ranks"] <= 8]
    gains = [
        s["over_ideal"]["tree_tokens"] / s["over_ideal"]["ours"] - 1
        for s in simulated
        if s["batch"] == "tau2-airline" and s["num_ranks"] == 8
    ]
    whole = load("end-to-end.json")["workloads"]["main"]
    step = whole["dense"]["step_seconds"] / whole["dta"]["step_seconds"]
    return markdown_table(
        ["", "paper", "node by node, here", "areal_dta, here"],
        [
            ["sequence tokens / tree tokens", "9.43", f"{sharing:.2f}", "the same"],
            [
                "over dense with checkpointing",
                "4.9 (1.7B) to 8.31 (14B)",
                ours("dense_ckpt", "dfs"),
                ours("dense_ckpt", "dta"),
            ],
            [
                "over dense without",
                "3.9 (1.7B)",
                ours("dense", "dfs"),
                ours("dense", "dta"),
            ],
            [
                'over "leaf": strict prefixes merged',
                "2.9 to 5.0",
                ours("leaf", "dfs"),
                ours("leaf", "dta"),
            ],
            [
                "over sparse tree attention",
                "1.5 to 1.7, with checkpointing",
                ours("packed", "dfs"),
                ours("packed", "dta"),
            ],
            [
                "peak memory, dense / this",
                "3.6 (1.7B: 77.8 GB to 21.7)",
                ours("dense", "dfs", "peak_bytes"),
                ours("dense", "dta", "peak_bytes"),
            ],
            [
                "peak memory, checkpointing / this",
                "1.8 (39.1 GB to 21.7)",
                ours("dense_ckpt", "dfs", "peak_bytes"),
                ours("dense_ckpt", "dta", "peak_bytes"),
            ],
            [
                "division over 8 ranks, over first-fit by tree tokens",
                "up to 13.6 %",
                "-",
                " and ".join(f"{gain:.0%}" for gain in gains) + ", predicted",
            ],
            ["end to end", "1.28 (1.7B), 2.28 (8B)", "-", f"{step:.2f}"],
        ],
        left=(0, 1),
    )


def long() -> str:
    return long_table(load("long.json")["points"])


def inspect() -> str:
    return inspect_table(load("inspect.json")["workloads"])


def memory() -> str:
    data = load("memory.json")
    return memory_table(data["branches"], data["peaks"])


def end_to_end() -> str:
    names = "end-to-end.json", "end-to-end-tau2.json"
    return end_to_end_table(
        {k: v for n in names for k, v in load(n)["workloads"].items()}
    )


def dispatch(part: str) -> str:
    rows = load("dispatch.json")[part]
    if part == "measured":
        return measured_table([Measured(**row) for row in rows])
    return simulated_table([Simulated(**row) for row in rows])


def collector() -> str:
    rows = load("collector.json")["rows"]
    for row in rows:
        row.pop("hold_up_seconds")  # derived
    return collector_table([Row(**row) for row in rows])


def generation() -> str:
    """Format the throughput of the embedded server."""
    data = load("generation.json")
    works = {
        "main": "main job, 4 x 16 prompts x 8 samples, 0.85 M",
        "agent": "agent, 2k to 5k tokens, 6 M",
    }
    servers = {"base": "0.1.0", "no cache": "without cache", "cache": "with"}
    rows = []
    for work, label in works.items():
        for server, name in servers.items():
            found = data[work][server]
            cells = [f"{found['cpu_seconds']:.2f}", f"{found['wall_seconds']:.2f}"]
            cells += [f"{found['hit_rate']:.2f}", f"{found['gemm_share'] * 100:.0f} %"]
            cells += [f"{found['bandwidth_share'] * 100:.0f} %"]
            rows.append([label if server == "base" else "", name, *cells])
    titles = "workload;server;CPU s;wall s;hit rate;share of GEMM peak"
    return markdown_table([*titles.split(";"), "share of bandwidth"], rows, left=(0, 1))


def soak() -> str:
    """Format what the hour with faults killed, and the slopes that it fitted."""
    data = load("soak.json")
    killed = markdown_table(
        ["killed", "after step", "all processes gone, s", "left behind"],
        [
            [k["killed"], f"{k['step']:,}", f"{k['seconds']:.1f}", k["wrong"] or "-"]
            for k in data["kills"]
        ],
    )
    fitted = markdown_table(
        ["sum over all processes", "mean", "slope per hour", "95 % interval"],
        [
            [name, f"{x['mean']:,.0f}", f"{x['slope_per_hour']:+,.0f}"]
            + [f"± {x['interval']:,.0f}"]
            for name, x in data["slopes"].items()
        ],
    )
    return f"{killed.strip()}\n\n{fitted.strip()}"


TABLES: dict[str, Callable[..., str]] = {
    "headline": headline,
    "other-work": other_work,
    "rewards": rewards,
    "recipes": recipes,
    "executor": executor,
    "paper": paper,
    "long": long,
    "memory": memory,
    "inspect": inspect,
    "collector": collector,
    "generation": generation,
    "end-to-end": end_to_end,
    "dispatch": dispatch,
    "soak": soak,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    """Return a page's text with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        return f"{match[1]}\n{TABLES[name](*arguments).strip()}\n\n{match[3]}"

    return _BLOCK.sub(made, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(argv)
    stale = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            stale.append(path)
            if not args.check:
                path.write_text(new, encoding="utf-8")
    print("\n".join(str(path.relative_to(ROOT)) for path in stale))
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
