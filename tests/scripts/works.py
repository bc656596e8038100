"""Small work for the benchmarks' tests."""

import numpy as np
import torch
from bench.workloads import Sizes, Work, Workload, make_workloads

CPU = torch.device("cpu")
SIZES = Sizes(vocab_size=512, path_tokens=150, prompt_tokens=10)


def work_of(name: str, sizes: Sizes = SIZES, answer_tokens: int = 6) -> Work:
    (workload,) = make_workloads(name, sizes, [answer_tokens], None)
    return Work.of(workload, CPU, seed=0)


def hand_made(*words: str, loss_tokens: int = 1) -> Work:
    sequences = tuple(np.array([ord(c) for c in word]) for word in words)
    masks = tuple(np.arange(len(s)) >= len(s) - loss_tokens for s in sequences)
    return Work.of(Workload("hand-made", "test", sequences, masks), CPU, seed=0)


# ---- the whole script
