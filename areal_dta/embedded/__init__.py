"""A tiny model and generated word problems, shipped with the package.

They make a complete reinforcement-learning run possible without a download or a GPU.
Importing this package loads the standard library only.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from areal_dta.embedded.problems import iter_problems

__all__ = ["SYSTEM_PROMPT", "generate_problems", "tiny_model_path"]

# One of the system prompts in the tiny model's training mix, about 40 tokens.
SYSTEM_PROMPT = (
    "You are a careful assistant. Solve the problem step by step. "
    "Write one calculation per line. Put the final answer after ####."
)


def tiny_model_path() -> str:
    """Return the directory of the tiny model, its tokenizer and chat template.

    Raises:
        FileNotFoundError: the package was installed without its assets.
    """
    path = Path(__file__).parent / "assets" / "tiny-qwen3"
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"the embedded model is missing at {path}; reinstall areal_dta with its "
            "package data, or run `python scripts/build_tiny_model.py`."
        )
    return str(path)


def generate_problems(
    num: int, seed: int, split: str | None = None
) -> list[dict[str, str]]:
    """Generate word problems, the same ones for the same arguments.

    Args:
        num: number of problems; their questions are distinct.
        seed: any integer.
        split: "train" or "test", which are disjoint for all seeds and sizes; None draws
            from both.

    Returns:
        Dicts of "question" and "answer"; the answer's last line is ``#### N``.
    """
    if num < 0:
        raise ValueError(f"num={num} must not be negative.")
    return [
        {"question": problem.question, "answer": problem.solution}
        for problem in islice(iter_problems(seed, split), num)
    ]
