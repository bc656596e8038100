"""The report on a corpus as plain data, which JSON, the table and the page show."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_dta.balance import CostModel, Plan, Pricing, partition
from areal_dta.inspect.corpus import Corpus, FlatTree
from areal_dta.inspect.lost_sharing import MIN_TOKENS, LostSharing, SharingSearch
from areal_dta.inspect.models import ModelSizes
from areal_dta.inspect.prediction import Budgets, Prediction, predict
from areal_dta.inspect.rollouts.text import TextTokenizer
from areal_dta.schedule import NeededOutputs
from areal_dta.tree.leaf_order import LeafOrder

REPORT_VERSION: Final = 1
_MIN_SHARE = 1e-3  # of the tree, that a finding costs to be reported


@dataclass(frozen=True, slots=True)
class Analysis:
    """What the report is made of; the page draws tree and schedule from it."""

    corpus: Corpus
    flat: FlatTree
    needed: NeededOutputs
    lost: LostSharing
    prediction: Prediction
    plan: Plan
    model: ModelSizes
    tokenizer: TextTokenizer | None
    report: dict[str, Any]
    """Plain data."""


def analyse(
    corpus: Corpus,
    model: ModelSizes,
    budgets: Budgets,
    num_ranks: int,
    tokenizer: TextTokenizer | None = None,
    source: dict[str, Any] | None = None,
) -> Analysis:
    """Analyse the sequences as one batch.

    Args:
        source: what the report says about the input: files, notes, limits.
    """
    flat = FlatTree(corpus)
    needed = corpus.needed()
    min_tokens = max(MIN_TOKENS, int(_MIN_SHARE * corpus.tree.num_tree_tokens))
    lost = SharingSearch(flat, tokenizer, min_tokens).run()
    prediction = predict(corpus.tree, needed, model, budgets)
    plan = _balance(corpus, prediction, model, num_ranks)
    report = {
        "version": REPORT_VERSION,
        "input": source or {},
        "sharing": _sharing(corpus, needed),
        "lost_sharing": _lost(corpus, lost),
        "histograms": _histograms(corpus),
        "model": {
            "name": model.name,
            "device": model.device,
            "element_bytes": model.element_bytes,
            "vocab_size": model.vocab_size,
            **dataclasses.asdict(model.sizes),
        },
        "schedule": _schedule(prediction, budgets),
        "ways": _ways(prediction),
        "balance": _ranks(plan),
    }
    return Analysis(
        corpus, flat, needed, lost, prediction, plan, model, tokenizer, report
    )


def _sharing(corpus: Corpus, needed: NeededOutputs) -> dict[str, Any]:
    tree = corpus.tree
    return {
        "num_sequences": tree.num_sequences,
        "num_sequence_tokens": tree.num_sequence_tokens,
        "num_tree_tokens": tree.num_tree_tokens,
        "sharing_ratio": tree.sharing_ratio,
        "num_nodes": len(tree.nodes),
        "num_leaves": sum(not n.children for n in tree.nodes),
        "longest": tree.max_depth,
        "knows_loss": corpus.knows_loss,
        "num_loss_tokens": corpus.num_loss_tokens if corpus.knows_loss else None,
        "num_computed_tokens": needed.num_computed_tokens,
        "num_outputs": needed.num_outputs,
    }


def _lost(corpus: Corpus, lost: LostSharing) -> dict[str, Any]:
    tree = corpus.tree
    total = sum(f.num_tokens for f in lost.findings)
    # Each is priced by itself, and two may claim the same tokens.
    left = max(tree.num_tree_tokens - total, tree.max_depth, 1)
    return {
        "num_tokens": total,
        "share_of_tree": total / max(1, tree.num_tree_tokens),
        "sharing_ratio_without": tree.num_sequence_tokens / left,
        "num_forks_examined": lost.num_forks,
        "num_comparisons_left_out": lost.num_left_out,
        "min_tokens": lost.min_tokens,
        "findings": [
            {
                "kind": str(f.kind),
                "role": f.role,
                "position": f.position,
                "before": f.before,
                "one": f.a,
                "other": f.b,
                "after": f.after,
                "where": list(f.where),
                "num_forks": f.num_forks,
                "num_sequences": f.num_sequences,
                "num_tokens": f.num_tokens,
                "share_of_tree": f.num_tokens / max(1, tree.num_tree_tokens),
                "advice": f.advice,
            }
            for f in lost.findings
        ],
    }


def _histograms(corpus: Corpus) -> dict[str, list[dict[str, int]]]:
    tree = corpus.tree
    num_forks = np.zeros(len(tree.nodes), np.int64)  # above each node
    for node in tree.nodes:
        if node.parent >= 0:
            above = tree.nodes[node.parent]
            num_forks[node.index] = num_forks[above.index] + (len(above.children) > 1)
    per_sequence = [int(num_forks[n.index]) for n in tree.nodes for _ in n.sequences]
    return {
        "branch_tokens": _histogram([n.num_tokens for n in tree.nodes]),
        "fork_depth_tokens": _histogram(
            [n.end for n in tree.nodes if len(n.children) > 1]
        ),
        "forks_per_sequence": _histogram(per_sequence),
        "sequence_tokens": _histogram([n.end for n in tree.nodes for _ in n.sequences]),
    }


def _histogram(values: list[int]) -> list[dict[str, int]]:
    """Count values by powers of two: from, to (exclusive), number."""
    if not values:
        return []
    array: NDArray[np.int64] = np.asarray(values, np.int64)
    level = np.frexp(array.astype(np.float64))[1]  # 0: zero; k: 2**(k-1) to 2**k - 1
    counts = np.bincount(level)
    first = int(level.min())
    return [
        {"from": 2 ** (k - 1) if k else 0, "to": 2**k, "count": int(counts[k])}
        for k in range(first, len(counts))
    ]


def _schedule(prediction: Prediction, budgets: Budgets) -> dict[str, Any]:
    schedule = prediction.schedule
    return {
        "memory_budget_bytes": budgets.memory_bytes,
        "fits": prediction.fits,
        "block_tokens": prediction.block_tokens,
        "retain_tokens": prediction.retain_tokens,
        "num_steps": len(schedule.steps),
        "num_blocks": schedule.num_blocks,
        "num_fragments": len(schedule.cut.fragments),
        "num_forward_tokens": schedule.num_forward_tokens,
        "num_recomputed_tokens": schedule.num_recomputed_tokens,
        "peak_graph_tokens": schedule.peak_graph_tokens,
        "peak_kv_tokens": schedule.peak_kv_tokens,
    }


def _ways(prediction: Prediction) -> list[dict[str, Any]]:
    return [
        {
            "name": way.name,
            "speed_up_over_dense": prediction.speed_up(way.name),
            "flops": way.flops,
            "cost": way.cost,
            "peak_bytes": way.peak_bytes,
            "num_calls": way.num_calls,
        }
        for way in prediction.ways
    ]


def _balance(
    corpus: Corpus, prediction: Prediction, model: ModelSizes, num_ranks: int
) -> Plan:
    tree = corpus.tree
    lengths = num_outputs = None
    if corpus.knows_loss:
        masks = (corpus.mask(i) for i in range(len(corpus)))
        needed = [np.flatnonzero(mask) for mask in masks]
        lengths = [int(n[-1]) if len(n) else 0 for n in needed]
        num_outputs = [len(n) for n in needed]
    pricing = Pricing.from_cost_model(
        CostModel.from_flops(model.flops),
        prediction.block_tokens,
        prediction.retain_tokens,
    )
    return partition(
        LeafOrder.from_tree(tree, lengths), num_ranks, pricing, num_outputs
    )


def _ranks(plan: Plan) -> dict[str, Any]:
    total = sum(plan.predicted_seconds) or 1.0
    return {
        "num_ranks": plan.num_ranks,
        "imbalance": plan.imbalance,
        "num_tree_tokens": plan.num_tree_tokens,
        "num_repeated_tokens": plan.num_repeated_tokens,
        "method": plan.method,
        "ranks": [
            {"num_sequences": len(indices), "share_of_seconds": seconds / total}
            for indices, seconds in zip(
                plan.assignments, plan.predicted_seconds, strict=True
            )
        ],
    }
