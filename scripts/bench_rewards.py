"""Train the main job with several seeds, its dense twin, and recipes: collect curves.

    python scripts/bench_rewards.py --json docs/benchmarks/rewards.json   # half an hour

Runs that are complete in the output folder are only read, and configurations that are
not asked for (``--configs``) keep what the file has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_dta.report.step_metrics import read_metrics

MAIN = "gsm8k_grpo.yaml"
RUNS = (
    {"config": MAIN, "seed": 1, "backend": "dta:d1", "steps": 50},
    {"config": MAIN, "seed": 2, "backend": "dta:d1", "steps": 50},
    {"config": MAIN, "seed": 3, "backend": "dta:d1", "steps": 50},
    {"config": MAIN, "seed": 1, "backend": "fsdp:d1", "steps": 50},
    {"config": "gsm8k_ppo.yaml", "seed": 1, "backend": "dta:d1", "steps": 50},
    {"config": "gsm8k_sft.yaml", "seed": 1, "backend": "dta:d1", "steps": 40},
    {"config": "gsm8k_dpo.yaml", "seed": 1, "backend": "dta:d1", "steps": 40},
    {"config": "gsm8k_rw.yaml", "seed": 1, "backend": "dta:d1", "steps": 60},
    {"config": "gsm8k_calculator.yaml", "seed": 1, "backend": "dta:d1", "steps": 25},
)


def curve_of(run: dict[str, Any], fileroot: Path) -> dict[str, Any]:
    """Return a run with its reward, else its loss, per step; train it if need be."""
    trial = f"seed{run['seed']}-{run['backend'].replace(':', '-')}"
    experiment = run["config"].removesuffix(".yaml").replace("_", "-")
    metrics = fileroot / experiment / trial / "metrics.jsonl"
    if not metrics.exists() or len(read_metrics(metrics)) < run["steps"]:
        command = [sys.executable, "-m", "areal_dta.launch", "--config", run["config"]]
        command += [f"seed={run['seed']}", f"actor.backend={run['backend']}"]
        command += [f"trial_name={trial}", f"cluster.fileroot={fileroot}"]
        command += [f"total_train_steps={run['steps']}"]
        subprocess.run(command, check=True)
    steps = read_metrics(metrics)
    name = "loss" if steps[0].reward is None else "reward"
    values = [round(getattr(m, name) or 0.0, 6) for m in steps]
    return {**run, "metric": name, "values": values}


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["config"], run["seed"], run["backend"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--configs", help="comma separated; default: all")
    parser.add_argument("--fileroot", type=Path, default=Path("bench_out/rewards"))
    args = parser.parse_args(argv)
    wanted = args.configs.split(",") if args.configs else [r["config"] for r in RUNS]
    found = {}
    if args.json.exists():
        found = {key_of(run): run for run in json.loads(args.json.read_text())["runs"]}
    for run in RUNS:
        if run["config"] in wanted:
            found[key_of(run)] = curve_of(run, args.fileroot.absolute())
    runs = [found[key_of(run)] for run in RUNS if key_of(run) in found]
    lines = ",\n".join(json.dumps(run) for run in runs)
    args.json.write_text(f'{{"runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
