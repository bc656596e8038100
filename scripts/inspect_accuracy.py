"""Compare what areal_dta.inspect predicts with what bench_executor.py measured.

    python -m areal_dta.inspect rollouts.jsonl --max-sequences 16 --npz rollouts.npz
    python scripts/bench_executor.py --data rollouts.npz --max-sequences 16 \
        --variants dense,dense_ckpt,packed,dta --clock cpu --json measured.json
    python scripts/inspect_accuracy.py rollouts.npz=measured.json --json accuracy.json

The predictions are for the same tokens and the model of the measurement.
``rollouts.npz@2000`` thins paths as ``--path-tokens 2000`` did.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.table import markdown_table
from bench.workloads import Sizes, load

from areal_dta.inspect.models import model_sizes
from areal_dta.inspect.prediction import Budgets, predict
from areal_dta.schedule import NeededOutputs
from areal_dta.tree import PrefixTree

WAYS = ("dense", "dense_ckpt", "packed", "dta")


def compare(tokens: Path, path_tokens: int | None, measured: Path) -> dict[str, Any]:
    """Return the measured and the predicted numbers of one workload."""
    content = json.loads(measured.read_text(encoding="utf-8"))
    run, (workload,) = content["run"], content["workloads"]
    model = model_sizes(run["model"].split()[0], run["dtype"], "cpu")
    sizes = Sizes(
        model.vocab_size,
        path_tokens=path_tokens,
        max_sequences=workload["num_sequences"],
    )
    work = load(workload["name"], tokens, sizes)
    tree = PrefixTree.from_sequences(work.sequences)
    assert tree.num_tree_tokens == workload["num_tree_tokens"], "other tokens"
    needed = NeededOutputs.logprobs_at(tree, [mask[1:] for mask in work.loss_masks])
    found = predict(tree, needed, model, Budgets())
    rows = []
    for m in workload["measurements"]:
        if m["variant"] not in WAYS:
            continue
        way = found.way(m["variant"])
        rows.append(
            {
                "name": way.name,
                "measured_ratio": m["ratio"],
                "measured_seconds": m["seconds"],
                "measured_sample": m["sample"],
                "predicted_ratio": found.speed_up(way.name),
                "measured_bytes": m["peak_bytes"],
                "predicted_bytes": way.peak_bytes,
            }
        )
    names = ("num_sequences", "num_sequence_tokens", "num_tree_tokens", "name")
    return {
        "machine": content["machine"],
        "run": run,
        **{name: workload[name] for name in names},
        "ways": rows,
    }


def table(workloads: list[dict[str, Any]]) -> str:
    """Format the comparison."""
    rows = []
    for work in workloads:
        for way in work["ways"]:
            sizes = way["measured_bytes"], way["predicted_bytes"]
            rows.append(
                [
                    work["name"],
                    way["name"],
                    f"{way['measured_ratio']:.2f}",
                    f"{way['predicted_ratio']:.2f}",
                    *(f"{size / 2**20:,.0f}" for size in sizes),
                ]
            )
    titles = ["work", "way", "ratio, measured", "predicted"]
    return markdown_table([*titles, "peak MiB, measured", "predicted"], rows, (0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="+", metavar="TOKENS.npz[@N]=MEASURED.json")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    workloads = []
    for pair in args.pairs:
        tokens, _, measured = pair.partition("=")
        tokens, _, path_tokens = tokens.partition("@")
        length = int(path_tokens) if path_tokens else None
        workloads.append(compare(Path(tokens), length, Path(measured)))
    print(table(workloads))
    if args.json is not None:
        args.json.write_text(json.dumps({"workloads": workloads}, indent=1) + "\n")


if __name__ == "__main__":
    main()
