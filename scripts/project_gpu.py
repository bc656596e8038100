"""Project seconds on a GPU without one: trees and dense training, Qwen3, bf16.

    python scripts/project_gpu.py --json docs/benchmarks/gpu-projection.json \
        --markdown docs/benchmarks/gpu-projection.md         # minutes, one core
    python scripts/project_gpu.py --models 8b --blocks 4096 --card my-card.yaml

Operators are recorded on fake CUDA tensors of real sizes, for models of a few layers,
and extrapolated to all layers, which are alike. Rates turn them into seconds
(scripts/projection/rates.py): a projection, and no measurement. Nothing is counted that
is not built; dense training is there as AReaL does it, and with the executor's fused
layers. `--layers` bounds the
layers that count, for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from bench.workloads import TEMPLATES, WORKLOADS, Sizes, make_workloads  # noqa: E402
from projection.passes import MODELS  # noqa: E402
from projection.project import CHOICES, Projector  # noqa: E402
from projection.rates import load_rates  # noqa: E402
from projection.table import markdown, one_line  # noqa: E402


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", default="0.6b,1.7b,4b,8b,14b,32b", help="comma separated")
    add("--blocks", default="512,1024,2048,4096,8192", help="tokens per model call")
    add("--choices", default="default", help=f"of {', '.join(CHOICES)}; joined by +")
    add("--card", default="h200", help="h100, h200, auto, or a JSON or YAML file")
    add("--workload", choices=WORKLOADS, default="tau2-airline")
    add("--path-tokens", type=int, default=16384, help="longest sequence, about")
    add("--max-sequences", type=int, default=16)
    add("--template", choices=TEMPLATES, default="empty-think")
    add("--layers", type=int, help="at most so many, for tests")
    add("--json", type=Path, metavar="FILE")
    add("--markdown", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def card_name(name: str) -> str:
    """Return the stated card that is nearest to the one at hand, for ``auto``."""
    if name != "auto":
        return name
    if not torch.cuda.is_available():
        return "h200"
    return "h200" if "H200" in torch.cuda.get_device_name() else "h100"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    rates = load_rates(card_name(args.card))
    sizes = Sizes(
        vocab_size=MODELS["8b"]["vocab_size"],
        path_tokens=args.path_tokens,
        max_sequences=args.max_sequences,
        template=args.template,
    )
    (workload,) = make_workloads(args.workload, sizes, [256], None)
    projector = Projector(workload, rates, args.layers)
    content: dict[str, Any] = {
        "command": " ".join(["python scripts/project_gpu.py", *(argv or sys.argv[1:])]),
        "is_projection": True,
        **projector.description,
        "rows": [],
    }
    for model in args.models.split(","):
        rows = projector.dense(model) + projector.dense(model, "on")
        for choice in args.choices.split(","):
            for block in args.blocks.split(","):
                rows.append(projector.tree(model, int(block), choice))
                print(f"{model} {block} {choice}: recorded", file=sys.stderr)
        for row in projector.compared(model, rows):
            content["rows"].append(row)
            print(one_line(row), flush=True)
        if args.json is not None:  # after each, so that a run cut short leaves some
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(content, indent=1) + "\n")
        if args.markdown is not None:
            raw = "" if args.json is None else args.json.name
            args.markdown.write_text(markdown(content, raw))


if __name__ == "__main__":
    main()
