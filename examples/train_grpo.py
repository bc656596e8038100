"""A training script of one's own, in AReaL's style, on the tree engine.

    python examples/train_grpo.py --config configs/gsm8k_grpo.yaml hardware=cpu

The two names from `areal_dta` are all that makes it train on prefix trees; from `areal`
and `areal.api.cli_args` the same names train densely. docs/migrate.md goes through it.
"""

import sys

from areal.api.cli_args import load_expr_config
from datasets import Dataset
from problem_workflow import ProblemWorkflow

from areal_dta import GRPOConfig, PPOTrainer
from areal_dta.embedded import generate_problems


def problems(split: str, num: int) -> Dataset:
    """Load the data: one row per prompt, with whatever the workflow needs."""
    found = generate_problems(num, seed=1, split=split)
    return Dataset.from_list(
        [{"question": p["question"], "answer": p["answer"]} for p in found]
    )


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    arguments = {"gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
    with PPOTrainer(config, train_dataset=problems("train", 512)) as trainer:
        trainer.train(workflow=ProblemWorkflow, workflow_kwargs=arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
