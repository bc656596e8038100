"""Batches to plan: sequences in depth-first order, by the thousand, without tokens."""

# N = sequences, in depth-first order

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree import LeafOrder, PrefixTree
from bench.workloads import EPISODES, Sizes, Workload, load, tau2
from recipes.tau2.recorded.sequences import load_sequences

IntArray = NDArray[np.int64]

GSM8K_TEMPLATE_TOKENS = 20  # in front of every question
GSM8K_ANSWERS = 16
_GSM8K_QUESTION = (60, 200)
_GSM8K_ANSWER_MEDIAN, _GSM8K_ANSWER_SIGMA, _GSM8K_LONGEST = 180, 0.5, 1024


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What ``partition`` wants; ``num_outputs`` and ``groups`` by sequence number."""

    name: str
    source: str
    order: LeafOrder
    num_outputs: IntArray
    groups: IntArray


def computed_lengths(workload: Workload) -> IntArray:
    """Tokens to compute of each sequence: those above its last loss token."""
    last = [np.flatnonzero(m)[-1:].sum() for m in workload.loss_masks]
    return np.array(last, np.int64)


def batch_of(workload: Workload, groups: IntArray) -> Batch:
    tree = PrefixTree.from_sequences(workload.sequences)
    num_outputs = np.array([int(m.sum()) for m in workload.loss_masks], np.int64)
    order = LeafOrder.from_tree(tree, computed_lengths(workload))
    return Batch(workload.name, workload.source, order, num_outputs, groups)


def tau2_workload(
    name: str, sizes: Sizes, replayed: Path | None
) -> tuple[Workload, IntArray]:
    """Episodes and the prompt (task) of each sequence; generated without a file."""
    if replayed is None:
        workload = tau2(name, sizes)
        episode = np.arange(len(workload.sequences)) // EPISODES[name].num_calls
        return workload, episode.astype(np.int64)
    workload = load(name, replayed, sizes)
    tasks = load_sequences(replayed).task_id[: len(workload.sequences)]
    return workload, np.unique(tasks, return_inverse=True)[1].reshape(-1)


def conversations(
    num_prompts: int, num_trajectories: int = 8, num_calls: int = 12, seed: int = 0
) -> tuple[LeafOrder, IntArray, IntArray]:
    """Batch shaped like tau2: a system prompt of 4,828 tokens, one sequence per call,
    four tokens of empty thinking before each completion.

    Returns:
        Order, prompt of each sequence, needed outputs of each sequence.
    """
    rng = np.random.default_rng(seed)
    lengths, lcps, prompts, outputs = [], [], [], []
    for prompt in range(num_prompts):
        first_turn = int(rng.integers(100, 501))
        for trajectory in range(num_trajectories):
            history, shared = 4828, 4828 if prompt else 0
            if trajectory:
                shared = history + first_turn
            calls = int(rng.integers(num_calls // 2, num_calls * 3 // 2 + 1))
            for call in range(calls):
                asked = history + (int(rng.integers(100, 501)) if call else first_turn)
                completion = int(rng.integers(60, 241))
                lengths.append(asked + 4 + completion)
                lcps.append(shared)
                prompts.append(prompt)
                outputs.append(completion)
                shared, history = asked, asked + completion
    order = LeafOrder.from_arrays(lengths, lcps)
    return order, np.array(prompts), np.array(outputs)


def gsm8k(num_sequences: int, seed: int) -> Batch:
    """Questions behind one template, each with 16 answers, all of which carry loss."""
    rng = np.random.default_rng(seed)
    num_questions = -(-num_sequences // GSM8K_ANSWERS)
    low, high = _GSM8K_QUESTION
    question = GSM8K_TEMPLATE_TOKENS + rng.integers(low, high + 1, num_questions)
    answer = rng.lognormal(
        np.log(_GSM8K_ANSWER_MEDIAN), _GSM8K_ANSWER_SIGMA, num_sequences
    )
    answer = np.clip(answer, 16, _GSM8K_LONGEST).astype(np.int64)
    group = np.arange(num_sequences) // GSM8K_ANSWERS
    # neighbours among the answers to one question agree on a few tokens
    agree = np.minimum(rng.geometric(0.3, num_sequences) - 1, 15)
    lcp = question[group] + agree
    lcp[::GSM8K_ANSWERS] = GSM8K_TEMPLATE_TOKENS
    lcp[0] = 0
    order = LeafOrder.from_arrays(question[group] + answer, lcp)
    return Batch("gsm8k", "generated", order, answer, group)


def replicated(batch: Batch, num_sequences: int) -> Batch:
    """Repeat a batch as often as it takes, as if each copy were of other prompts.

    Copies share what all sequences of the batch do (the system prompt).
    """
    order, n = batch.order, len(batch.order)
    copies = -(-num_sequences // n)
    common = int(order.lcp_N[1:].min(initial=int(order.length_N.min())))
    lcp = np.tile(order.lcp_N, copies)
    lcp[n::n] = common
    by_position = order.sequence_N
    num_groups = int(batch.groups.max(initial=0)) + 1
    groups = np.repeat(np.arange(copies), n) * num_groups
    groups += np.tile(batch.groups[by_position], copies)
    large = LeafOrder.from_arrays(np.tile(order.length_N, copies), lcp)
    num_outputs = np.tile(batch.num_outputs[by_position], copies)
    return Batch(
        batch.name, f"{batch.source}, {copies} copies", large, num_outputs, groups
    )
