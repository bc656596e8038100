"""Build the tiny Qwen3 model that ships in areal_dta/embedded/assets/tiny-qwen3.

    python scripts/build_tiny_model.py                  # about 8 minutes on one core
    python scripts/build_tiny_model.py --quick --out /tmp/quick      # seconds, to test

Trains the tokenizer and a model of 0.85 M parameters on generated word problems: first
on correct answers, then briefly on a mix with faults that reinforcement can mend
(listed in tiny_model/corpus.py). Two runs with the same arguments, versions
and processor write the same bytes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_model.corpus import Fault, Mix, sample_conversation
from tiny_model.evaluate import SETTINGS, accuracy_table
from tiny_model.tokenizer import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    save_tokenizer,
    train_tokenizer,
)
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from areal_dta.embedded.problems import iter_problems

ASSETS = Path(__file__).parents[1] / "areal_dta/embedded/assets/tiny-qwen3"

BATCH_SIZE = 16
POOL_BATCHES = 32  # batches that are sorted by length together, to reduce padding
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.01
# Some loss on the prompt teaches the words faster than loss on the answers alone.
PROMPT_WEIGHT = 0.1
LOG_EVERY = 400


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    num_steps: int
    learning_rate: float
    mix: Mix


STAGES: tuple[Stage, ...] = (
    Stage("clean", 2800, 2e-3, Mix(system_share=0.4, tool_share=0.12)),
    Stage(
        "faulty",
        400,
        1e-3,
        Mix(
            system_share=0.4,
            tool_share=0.12,
            faults={
                Fault.NONE: 0.40,
                Fault.FORMAT: 0.20,
                Fault.NO_STEPS: 0.25,
                Fault.LAST_STEP: 0.15,
            },
        ),
    ),
)


def build_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def iter_samples(
    tokenizer: PreTrainedTokenizerFast, mix: Mix, seed: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Generate token ids and loss weights endlessly, one conversation at a time."""
    rng = random.Random(seed)
    # Only the training split: test problems stay unseen.
    for problem in iter_problems(seed, "train"):
        conversation = sample_conversation(rng, problem, mix)
        encoded = tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        weights = [1.0 if m else PROMPT_WEIGHT for m in encoded["assistant_masks"]]
        yield encoded["input_ids"], weights


def iter_batches(
    tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Generate batches endlessly, see `collate`."""
    samples = iter_samples(tokenizer, stage.mix, seed)
    rng = random.Random(seed)
    while True:
        pool = list(islice(samples, BATCH_SIZE * POOL_BATCHES))
        pool.sort(key=lambda sample: len(sample[0]))
        starts = list(range(0, len(pool), BATCH_SIZE))
        rng.shuffle(starts)
        for start in starts:
            yield collate(pool[start : start + BATCH_SIZE], tokenizer.pad_token_id)


def collate(
    samples: list[tuple[list[int], list[float]]], pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded token ids and weights, both [B, T]; padding weighs 0."""
    ids, weights = zip(*samples, strict=True)
    return (
        pad_sequence(list(map(torch.tensor, ids)), True, pad_token_id),
        pad_sequence(list(map(torch.tensor, weights)), True),
    )


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: int
) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.learning_rate, weight_decay=WEIGHT_DECAY
    )
    warmup = min(WARMUP_STEPS, stage.num_steps // 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / (warmup + 1),
            (stage.num_steps - step) / (stage.num_steps - warmup),
        ),
    )
    model.train()
    started = time.process_time()
    batches = iter_batches(tokenizer, stage, seed)
    for step in range(1, stage.num_steps + 1):
        input_ids, weights = next(batches)
        # Causal attention never looks right, so right padding needs no mask.
        logits_BTV = model(input_ids=input_ids, use_cache=False).logits
        losses = F.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1),
            input_ids[:, 1:].flatten(),
            reduction="none",
        )
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % LOG_EVERY == 0 or step == stage.num_steps:
            seconds = time.process_time() - started
            print(
                f"{stage.name}: step {step}/{stage.num_steps}, "
                f"loss {loss.item():.3f}, {seconds:.0f} CPU seconds",
                flush=True,
            )


def save_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Save the weights in bfloat16 under a configuration that loads them as float32.

    Half the size; generation and training on a CPU still run in float32.
    """
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, to test this script"
    )
    parser.add_argument(
        "--num-eval", type=int, default=256, help="problems per accuracy"
    )
    args = parser.parse_args(argv)

    # Same arguments, versions and processor: same bytes.
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    stages, settings, num_eval = STAGES, SETTINGS, args.num_eval
    if args.quick:
        stages = tuple(replace(stage, num_steps=5) for stage in STAGES)
        settings, num_eval = SETTINGS[:1], min(num_eval, 4)

    # Train the tokenizer, then the model in stages.
    rng = random.Random(args.seed)
    conversations = [
        sample_conversation(rng, problem, stages[-1].mix)
        for problem in islice(iter_problems(args.seed, "train"), 4000)
    ]
    tokenizer = train_tokenizer(conversations)
    torch.manual_seed(args.seed)
    model = build_model()
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {args.threads} threads, seed {args.seed}")
    for index, stage in enumerate(stages):
        train(model, tokenizer, stage, seed=args.seed + index)
        table = accuracy_table(model, tokenizer, num_eval, args.seed, settings)
        print(table, flush=True)

    # Save both.
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    save_model(model, args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
