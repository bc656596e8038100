"""A quick look at what the tree saves on this machine, before any benchmark.

    python scripts/check_speed.py --prompt 2048 --answers 8 --answer-tokens 128

One prompt, several answers, random weights: dense training (one sequence at a time)
and the tree executor on the same work in one process, with the gradient error between
them and the bound that FLOPs set.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.schedule import FlopModel
from areal_dta.tree import PrefixTree


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--retain-tokens", type=int, default=None)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 64),
        head_dim=32,
    )
    model = Qwen3ForCausalLM(config)
    prompt = torch.randint(args.vocab, (args.prompt,))
    answers = torch.randint(args.vocab, (args.answers, args.answer_tokens))
    batch = [torch.cat([prompt, answer]).numpy() for answer in answers]
    tree = PrefixTree.from_sequences(batch)
    executor = TreeExecutor(
        model, ExecutorConfig(args.block_tokens, args.retain_tokens)
    )
    grads: dict[str, torch.Tensor] = {}

    def loss(index: int, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return -logprobs[args.prompt - 1 :].mean() * (1 - 2 * (index % 2))

    def run(name: str, step: Callable[[], object]) -> Callable[[], None]:
        def timed() -> None:
            model.zero_grad(set_to_none=True)
            step()
            flat = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            grads[name] = torch.cat(flat)

        return timed

    dense = median_seconds(
        run("dense", lambda: oracle.forward_backward(model, batch, loss)),
        args.repeats,
    )
    ours = median_seconds(
        run("tree", lambda: executor.forward_backward(tree, loss)), args.repeats
    )
    error = (grads["tree"] - grads["dense"]).norm() / grads["dense"].norm()
    bound = FlopModel.from_config(config).bound(tree)
    stats = executor.last_stats
    assert stats is not None
    print(
        f"{platform.processor() or platform.machine()}, {args.threads} thread(s), "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{model.num_parameters() / 1e6:.1f} M parameters, fp32, seed {args.seed}, "
        f"median of {args.repeats}\n"
    )
    print("| variant | seconds | ratio to dense | blocks | tokens run |")
    print("|---|---|---|---|---|")
    print(f"| dense | {dense:.3f} | 1.00 | - | {tree.num_sequence_tokens} |")
    print(
        f"| tree | {ours:.3f} | {dense / ours:.2f} | {stats.num_blocks} | "
        f"{stats.num_forward_tokens} |"
    )
    print(
        f"\nsharing {tree.sharing_ratio:.2f}, FLOP bound {bound:.2f}, "
        f"efficiency {dense / ours / bound:.2f}, gradient error {float(error):.1e}"
    )


if __name__ == "__main__":
    main()
