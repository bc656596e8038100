"""The report as one HTML page: tree and schedule drawn, text of a node on a click.

The page is a template with the data as JSON inside; it loads nothing. Texts go into the
page by ``textContent`` alone, so nothing in a rollout can become markup.
"""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.resources import files
from typing import Any, Final

import numpy as np

from areal_dta.inspect.analysis import Analysis
from areal_dta.inspect.prediction import step_bytes
from areal_dta.inspect.table import HISTOGRAMS, WAYS
from areal_dta.schedule import StepKind

MAX_NODES: Final = 4000
"""Nodes that are drawn; the smallest branches beyond are drawn as one each."""
MAX_STEPS: Final = 6000
_HEAD, _TAIL = 500, 200  # characters of a node's text that are kept
_TEXT_BYTES: Final = 6_000_000  # of all texts; they get shorter beyond


def page(analysis: Analysis, title: str = "Rollouts") -> str:
    """Return the page."""
    data = {
        "title": title,
        "report": analysis.report,
        "ways": WAYS,
        "histograms": HISTOGRAMS,
        "nodes": _nodes(analysis),
        "steps": _steps(analysis),
        "isText": analysis.tokenizer is not None,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # "</script>" and "<!--" would end the data; a line separator is no JavaScript.
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    template = files("areal_dta.inspect").joinpath("page.html").read_text("utf-8")
    before, mark, after = template.partition("{{DATA}}")
    assert mark
    return before + text + after


def _nodes(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the nodes to draw, in depth-first order, parents by index."""
    flat = analysis.flat
    nodes = flat.nodes
    shown = _shown(analysis)
    blocks = _blocks_of_nodes(analysis)
    loss_before = np.concatenate([[0], np.cumsum(flat.is_loss_T)])
    limit = max(40, min(_HEAD + _TAIL, _TEXT_BYTES // max(1, len(shown))))
    found = defaultdict(list)
    for number, finding in enumerate(analysis.lost.findings):
        found[finding.node].append(number)
    index: dict[int, int] = {}
    result: list[dict[str, Any]] = []
    for n in nodes:
        if n.index not in shown:
            continue
        index[n.index] = len(result)
        end = n.first_token + n.num_tokens
        entry: dict[str, Any] = {
            "p": index.get(n.parent, -1),
            "s": n.start,
            "n": n.num_tokens,
            "q": flat.num_sequences_below(n.index),
            "e": len(n.sequences),
            "l": int(loss_before[end] - loss_before[n.first_token]),
            "t": _text(analysis, n.index, limit),
            "b": blocks.get(n.index, [])[:8],
            "w": [analysis.corpus.where[i] for i in n.sequences[:3]],
        }
        if n.index in found:
            entry["f"] = found[n.index]
        result.append(entry)
        hidden = [c for c in n.children if c not in shown]
        if hidden:
            tokens = sum(flat.subtree_tokens(c) for c in hidden)
            result.append(
                {
                    "p": index[n.index],
                    "s": n.end,
                    "n": tokens,
                    "q": sum(map(flat.num_sequences_below, hidden)),
                    "e": 0,
                    "l": 0,
                    "t": f"{len(hidden):,} more branches, {tokens:,} tokens",
                    "b": [],
                    "w": [],
                    "m": 1,
                }
            )
    return result


def _shown(analysis: Analysis) -> set[int]:
    """Return the nodes to draw: those with the largest subtrees, and findings."""
    flat = analysis.flat
    nodes = flat.nodes
    if len(nodes) <= MAX_NODES:
        return set(range(len(nodes)))
    order = sorted(range(len(nodes)), key=lambda i: (-flat.subtree_tokens(i), i))
    shown = set(order[:MAX_NODES])  # a parent's subtree is the larger one
    for finding in analysis.lost.findings:
        node = finding.node
        while node >= 0 and node not in shown:
            shown.add(node)
            node = nodes[node].parent
    return shown


def _text(analysis: Analysis, node: int, limit: int) -> str:
    """Return the text of a node, or its ids, with the middle cut out of a long one."""
    ids = analysis.flat.nodes[node].tokens
    tokenizer = analysis.tokenizer
    head, tail = limit * _HEAD // (_HEAD + _TAIL), limit * _TAIL // (_HEAD + _TAIL)
    num_cut = max(0, len(ids) - head - tail)  # a token has a character or more

    def show(part: Any) -> str:
        if tokenizer is None:
            return " ".join(map(str, part.tolist()))
        return tokenizer.decode(part)

    if num_cut:
        return f"{show(ids[:head])[:head]} … {show(ids[len(ids) - tail :])[-tail:]}"
    text = show(ids)
    if len(text) > head + tail + 3:
        return f"{text[:head]} … {text[len(text) - tail :]}"
    return text


def _blocks_of_nodes(analysis: Analysis) -> dict[int, list[int]]:
    blocks: dict[int, list[int]] = defaultdict(list)
    for segment in analysis.prediction.schedule.cut.segments:
        if segment.fragment not in blocks[segment.node]:
            blocks[segment.node].append(segment.fragment)
    return blocks


def _steps(analysis: Analysis) -> list[list[float]]:
    """Return the steps: kind, fragment, depth, tokens run, tokens of the fragment,
    peak MiB. Kind: 0 enter with a graph, 1 enter without, 2 both passes, 3 backward.
    """
    schedule = analysis.prediction.schedule
    peaks = step_bytes(schedule, analysis.model)
    result = []
    for step, peak in zip(schedule.steps[:MAX_STEPS], peaks, strict=False):
        fragment = schedule.cut.fragments[step.fragment]
        if step.kind is StepKind.ENTER:
            kind = 0 if step.with_grad else 1
        else:
            kind = 2 if step.computes else 3
        result.append(
            [
                kind,
                step.fragment,
                fragment.path_tokens,
                step.num_tokens,
                fragment.num_tokens,
                round(peak / 2**20, 1),
            ]
        )
    return result
