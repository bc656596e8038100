"""Examine this machine: python -m areal_dta.doctor [--model NAME] [--json FILE].

Ends with 0 if prefix trees can be trained here, with 1 if something is wrong; the last
lines say what. About a minute on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from areal_dta.doctor.machine import Finding, Machine, inspect_machine, judge_machine

_NEEDED = ("numpy", "torch", "transformers", "rich")
_SECONDS = {"cpu": 20.0, "cuda": 60.0}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m areal_dta.doctor",
        description="What this machine has, whether it computes right, and how fast.",
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="of the hub, or a path: what auto would choose")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seconds", type=float, help="for timing blocks; 20 on a CPU, 60 on a GPU")
    add("--json", type=Path, metavar="FILE", help="write all that was found")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        print(f"the doctor needs {', '.join(missing)}: pip install {' '.join(missing)}")
        return 1
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    # What is installed; then imports of torch, which take seconds.
    from areal_dta.doctor.report import Printer

    printer = Printer()
    machine = inspect_machine()
    printer.machine(machine)
    findings = judge_machine(machine)

    # Results and seconds on the device.
    from areal_dta.doctor.choice import model_choice
    from areal_dta.doctor.parity import check_kernels, check_models
    from areal_dta.doctor.timing import time_blocks

    device = _device(args.device, machine, findings)
    checks = [*check_kernels(device), *check_models(device)]
    printer.parity(checks, device)
    findings += [
        Finding(True, f"{check.name} ({check.dtype}): {check.failure}")
        for check in checks
        if check.failure
    ]
    seconds = args.seconds if args.seconds is not None else _SECONDS[device]
    timings = time_blocks(device, seconds)
    printer.timings(timings, device)

    # What a run with a named model would choose.
    choice = None
    if args.model is not None:
        choice = model_choice(args.model, machine)
        printer.choice(choice)
        findings += choice.findings
    printer.verdict(findings, machine, device)

    problems = [finding.text for finding in findings if finding.is_problem]
    if args.json is not None:
        content = {
            "machine": asdict(machine),
            "device": device,
            "parity": [asdict(check) for check in checks],
            "blocks": [asdict(timing) for timing in timings],
            "model": None if choice is None else asdict(choice),
            "problems": problems,
            "notes": [f.text for f in findings if not f.is_problem],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if problems else 0


def _device(asked: str, machine: Machine, findings: list[Finding]) -> str:
    """Return ``cpu`` or ``cuda``; adds a finding where CUDA was asked for in vain."""
    if asked == "auto":
        return "cuda" if machine.cards else "cpu"
    if asked == "cuda" and not machine.cards:
        findings.append(Finding(True, "--device cuda, but torch finds no CUDA device"))
        return "cpu"
    return asked


if __name__ == "__main__":
    sys.exit(main())
