"""Supervised fine-tuning by a script of one's own, on the tree engine.

    python examples/train_sft.py --config examples/sft.yaml

docs/migrate.md goes through such scripts.
"""

import sys

from areal.api.cli_args import load_expr_config
from areal.utils.hf_utils import load_hf_tokenizer
from datasets import Dataset

from areal_dta import SFTConfig, SFTTrainer
from areal_dta.embedded import generate_problems


def examples(tokenizer, num: int) -> Dataset:
    rows = []
    for problem in generate_problems(num, seed=1, split="train"):
        question = tokenizer.encode(problem["question"] + "\n")
        answer = tokenizer.encode(problem["answer"] + tokenizer.eos_token)
        mask = [0] * len(question) + [1] * len(answer)
        rows.append({"input_ids": question + answer, "loss_mask": mask})
    return Dataset.from_list(rows)


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, SFTConfig)
    data = examples(load_hf_tokenizer(config.tokenizer_path), 512)
    with SFTTrainer(config, train_dataset=data) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
