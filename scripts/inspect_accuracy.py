"""Compare what areal_dta.inspect predicts with what bench_executor.py measured.

    python -m areal_dta.inspect rollouts.jsonl --max-sequences 16 --npz rollouts.npz
    python scripts/bench_executor.py --data rollouts.npz --max-sequences 16 \
        --variants dense,dense_ckpt,packed,dta --clock cpu --json measured.json
    python scripts/inspect_accuracy.py rollouts.npz=measured.json --json accuracy.json

The predictions are for the same tokens, the model of the measurement, and its budgets.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.table import markdown_table

from areal_dta.inspect.corpus import Corpus, Limits
from areal_dta.inspect.models import model_sizes
from areal_dta.inspect.prediction import Budgets, predict
from areal_dta.inspect.rollouts.readers import Reader

WAYS = ("dense", "dense_ckpt", "packed", "dta")


def compare(tokens: Path, measured: Path) -> dict[str, Any]:
    """Return the measured and the predicted numbers of one workload."""
    content = json.loads(measured.read_text(encoding="utf-8"))
    run, (workload,) = content["run"], content["workloads"]
    corpus = Corpus()
    corpus.read(Reader().read([tokens]), Limits(workload["num_sequences"]))
    assert corpus.tree.num_tree_tokens == workload["num_tree_tokens"]
    model = model_sizes(run["model"].split()[0], run["dtype"], "cpu")
    found = predict(corpus.tree, corpus.needed(), model, Budgets())
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
    parser.add_argument("pairs", nargs="+", metavar="TOKENS.npz=MEASURED.json")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    workloads = []
    for pair in args.pairs:
        tokens, _, measured = pair.partition("=")
        workloads.append(compare(Path(tokens), Path(measured)))
    print(table(workloads))
    if args.json is not None:
        args.json.write_text(json.dumps({"workloads": workloads}, indent=1) + "\n")


if __name__ == "__main__":
    main()
