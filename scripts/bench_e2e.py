"""Compare whole runs: the same steps with the tree engine, its dense twin, and AReaL.

    python scripts/bench_e2e.py --workloads main --variants dta,dense --steps 8
    python scripts/bench_e2e.py --steps 20 --repeats 3 --json e2e.json --plot e2e.png
    python scripts/bench_e2e.py --base ../areal_dta-0.1.0 --variants dta,dense

Each run is one command of the launcher, with the same seed and data; variants take
turns. Seconds are medians over the steps without the first ones. Rollouts follow the
policy, so that after some steps variants see other tokens, in about equal amounts.

  dta    the tree engine                                          (actor.backend=dta:d1)
  dense  AReaL's engine, one attention call per sequence, with    (fsdp:d1)
         this package's dispatch
  areal  AReaL's engine and controller, untouched                 (areal-fsdp:d1)

Workloads: ``main`` (gsm8k_grpo.yaml), ``calculator`` (gsm8k_calculator.yaml), and
``tau2-6m``, ``tau2-20m`` (tau2_smoke.yaml with a random model of that size, which is
made first). The last two need ``pip install -e ".[tau2]"``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.e2e_report import PAPER, Run, plot, report, table
from bench.table import header, machine

ROOT = Path(__file__).resolve().parents[1]
VARIANTS: Final = {"dta": "dta:d1", "dense": "fsdp:d1", "areal": "areal-fsdp:d1"}
"""Name -> ``actor.backend``."""


@dataclass(frozen=True, slots=True)
class Workload:
    config: str
    model: str | None = None
    """Key of MODELS; None: the configuration's own model."""


WORKLOADS: Final = {
    "main": Workload("gsm8k_grpo.yaml"),
    "calculator": Workload("gsm8k_calculator.yaml"),
    "tau2-6m": Workload("tau2_smoke.yaml", "6m"),
    "tau2-20m": Workload("tau2_smoke.yaml", "20m"),
}
# The embedded model's shape, wider and deeper: 6.4 M and 21.4 M parameters.
MODELS: Final = {
    "6m": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "20m": {
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
    },
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--workloads", default=",".join(WORKLOADS), help="comma separated")
    add("--variants", default=",".join(VARIANTS), help="comma separated")
    add("--steps", type=int, default=20)
    add("--warm-up", type=int, default=2, help="steps left out at the start of a run")
    add("--repeats", type=int, default=1, help="runs of each variant, by seed")
    add("--seed", type=int, default=1, help="of the first repeat; then one more each")
    add("--base", type=Path, default=ROOT, help="checkout to measure (default: this)")
    add("--override", action="append", default=[], metavar="KEY=VALUE")
    add("--timeout-minutes", type=float, default=60.0, help="of one run")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    args.workloads = _names(parser, "--workloads", args.workloads, WORKLOADS)
    args.variants = _names(parser, "--variants", args.variants, VARIANTS)
    if not 0 <= args.warm_up < args.steps:
        parser.error(
            f"--warm-up {args.warm_up}: expected 0 to {args.steps - 1} for "
            f"--steps {args.steps}"
        )
    if not (args.base / "areal_dta" / "launch.py").is_file():
        parser.error(
            f"--base {args.base}: expected a checkout with areal_dta/launch.py"
        )
    if "areal" in args.variants and not _has_untouched_areal(args.base):
        parser.error(
            f"--variants areal: {args.base} has no backend {VARIANTS['areal']}, which "
            "leaves AReaL's engine and controller untouched; use --variants dta,dense"
        )
    return args


def _names(
    parser: argparse.ArgumentParser, option: str, text: str, known: dict[str, Any]
) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            parser.error(f"{option} {name}: expected some of {', '.join(known)}")
    return names


def _has_untouched_areal(base: Path) -> bool:
    name = VARIANTS["areal"].partition(":")[0]
    path = base / "areal_dta" / "config" / "backends.py"
    return path.is_file() and f'"{name}"' in path.read_text()


def build_model(name: str, folder: Path) -> int:
    """Write a model of MODELS with the embedded one's tokenizer.

    Returns:
        The number of its parameters.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from areal_dta.embedded import tiny_model_path

    embedded = Path(tiny_model_path())
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(embedded, folder, ignore=weights)
    config = AutoConfig.from_pretrained(embedded)
    for key, value in MODELS[name].items():
        setattr(config, key, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def command(
    args: argparse.Namespace, workload: str, variant: str, seed: int, model: Path | None
) -> list[str]:
    """Return the launcher's command of one run."""
    words = [sys.executable, "-m", "areal_dta.launch"]
    words += ["--config", WORKLOADS[workload].config]
    words += [f"actor.backend={VARIANTS[variant]}", f"seed={seed}"]
    words += [f"total_train_steps={args.steps}", "cluster.fileroot=outputs"]
    if model is not None:
        words.append(f"actor.path={model}")
    return [*words, *args.override]


def run_once(
    words: Sequence[str], base: Path, folder: Path, minutes: float
) -> list[Any]:
    """Run a command in a folder of its own and return the records of its steps.

    Raises:
        RuntimeError: the run failed or took too long; with what it said last.
    """
    folder.mkdir(parents=True)
    env = os.environ | {"PYTHONPATH": str(base.resolve())}
    with open(folder / "launch.txt", "w") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout=60 * minutes)
        except BaseException:  # too long, or Ctrl-C: it ends its own processes
            process.terminate()
            process.wait()
            raise
    paths = list(folder.glob("outputs/*/*/metrics.jsonl"))
    if code or len(paths) != 1:
        last = (folder / "launch.txt").read_text()[-1500:]
        raise RuntimeError(f"exit code {code}: {' '.join(words)}\n{last}")
    return [json.loads(line) for line in paths[0].read_text().splitlines()]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    import torch

    where = machine(torch.device("cpu"))
    what = {
        "steps": args.steps,
        "warm-up": args.warm_up,
        "repeats": args.repeats,
        "seed": args.seed,
        "checkout": args.base.resolve().name,
    }
    if args.override:
        what["overrides"] = " ".join(args.override)
    print(header("End-to-end", where, what), flush=True)
    runs: list[Run] = []
    workloads: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[str, Path] = {}
        for workload in args.workloads:
            if (name := WORKLOADS[workload].model) is not None:
                models[workload] = Path(scratch) / "models" / name
                what[f"parameters of {name}"] = build_model(name, models[workload])
            for repeat in range(args.repeats):
                for variant in args.variants:
                    seed = args.seed + repeat
                    load = round(os.getloadavg()[0], 1)
                    say = f"{workload}, {variant}, seed {seed}, load average {load}"
                    print(say, file=sys.stderr, flush=True)
                    words = command(args, workload, variant, seed, models.get(workload))
                    folder = Path(scratch) / workload / f"{variant}-{seed}"
                    records = run_once(words, args.base, folder, args.timeout_minutes)
                    runs.append(Run(workload, variant, seed, load, records))
            workloads = report(runs, args.warm_up)
            if args.json is not None:  # after each, so that one cut short leaves some
                content = {"machine": where, "run": what, "workloads": workloads}
                args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(workloads))
    print(PAPER)
    if args.plot is not None:
        plot(workloads, args.plot)


if __name__ == "__main__":
    main()
