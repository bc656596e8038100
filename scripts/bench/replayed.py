"""Replays recorded tau2 episodes as workloads, if the recordings and tau2 exist."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAJECTORIES = ROOT.parent / "shared/data/tau2/trajectories.jsonl"
DOMAINS = {"tau2-airline": "airline", "tau2-telecom-solo": "telecom_solo"}
_TIMEOUT_SECONDS = 600


def why_not_replayed() -> str | None:
    """Return what is missing for a replay; None if nothing is."""
    if not TRAJECTORIES.exists():
        return f"no {TRAJECTORIES.relative_to(ROOT.parent)}"
    for package in ("tau2", "qwen_agent"):  # the second holds the tokenizer's file
        if importlib.util.find_spec(package) is None:
            return f"no {package}"
    return None


def replay(
    name: str, folder: Path, template: str, max_sequences: int, max_tokens: int | None
) -> Path:
    """Write ``folder/<name>.npz`` by recipes/tau2/replay.py. Takes about 20 s.

    In a process of its own: tau2 brings in a lot that must not be measured.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    path = folder / f"{name}.npz"
    command = [sys.executable, "-m", "recipes.tau2.replay"]
    command += ["--trajectories", str(TRAJECTORIES), "--domain", DOMAINS[name]]
    command += ["--template", template, "--max-sequences", str(max_sequences)]
    command += ["--max-tokens", str(max_tokens)] if max_tokens is not None else []
    command += ["--out", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
    )
    if done.returncode:
        raise RuntimeError(
            f"the replay of {name} failed ({done.returncode}): "
            f"{done.stderr.strip()[-500:]}; --data none generates the workload instead"
        )
    return path
