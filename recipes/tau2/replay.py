"""Convert recorded tau2 episodes to token sequences with loss masks.

    python -m recipes.tau2.replay --trajectories trajectories.jsonl --domain airline \
        --export individual --template plain --out airline.npz

These are the sequences that training on the episodes would see, so benchmarks and tests
run on real shapes and real sharing without a model or a server. Prints a Markdown table
with one row per domain.

Exit codes: 0 done, 2 an argument or the file is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.tau2.domains import DOMAINS, AgentContext, agent_context, find_domain
from recipes.tau2.recorded.conversation import agent_conversation
from recipes.tau2.recorded.qwen_tokenizer import load_tokenizer
from recipes.tau2.recorded.sequences import SequenceBatch, save_sequences
from recipes.tau2.recorded.sharing import markdown_table, sharing_statistics
from recipes.tau2.recorded.trajectories import Trajectory, read_trajectories
from recipes.tau2.recorded.turns import (
    Template,
    TokenIds,
    TurnTokenizer,
    call_sequence,
    conversation_sequence,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Row(NamedTuple):
    trajectory: Trajectory
    call: int
    tokens: TokenIds
    loss_mask: NDArray[np.bool_]


class Export(StrEnum):
    """Which sequences an episode becomes; the names are AReaL's."""

    INDIVIDUAL = "individual"
    """One per model call: its prompt and its reply."""
    CONCAT = "concat"
    """One per episode: the conversation up to the last reply."""


def replay(
    trajectories: Sequence[Trajectory],
    tokenizer: PreTrainedTokenizerBase,
    export: Export = Export.INDIVIDUAL,
    template: Template = Template.PLAIN,
    *,
    think_tokens: int = 200,
    seed: int = 0,
    max_sequences: int | None = None,
    max_tokens: int | None = None,
    context: Callable[[str, str], AgentContext] = agent_context,
) -> SequenceBatch:
    """Turn episodes into sequences: by domain, then in order of episode and call.

    Episodes in which the model was never called are left out.

    Args:
        think_tokens: average filler tokens per call, for the template "think".
        seed: seed of the filler.
        max_sequences: maximum sequences per domain.
        max_tokens: maximum tokens per domain, shared ones counted each time; the
            sequence that would exceed it and all later ones are left out.
        context: returns the agent's prompt and tools, for a domain and a task id.

    Raises:
        MissingTau2Error: tau2 is not installed, and `context` is the default.
        ValueError: an episode or the chat template is not as expected, a limit is not
            positive, or no sequence is left.
    """
    limits = (("max_sequences", max_sequences), ("max_tokens", max_tokens))
    for name, limit in limits:
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit}; expected at least 1")
    turn_tokenizer = TurnTokenizer(tokenizer, template, think_tokens, seed)
    rows: list[_Row] = []
    for domain in dict.fromkeys(trajectory.domain for trajectory in trajectories):
        candidates = (
            row
            for trajectory in trajectories
            if trajectory.domain == domain
            for row in _rows(trajectory, turn_tokenizer, export, context)
        )
        rows += _within(candidates, max_sequences, max_tokens)
    if not rows:
        raise ValueError("no model is called in these trajectories; nothing to replay")
    return _batch(rows)


def _within(
    candidates: Iterable[_Row], max_sequences: int | None, max_tokens: int | None
) -> list[_Row]:
    """Return the first of the candidates, as many as the limits allow."""
    rows: list[_Row] = []
    num_tokens = 0
    for row in candidates:
        num_tokens += len(row.tokens)
        if max_tokens is not None and num_tokens > max_tokens:
            if not rows:
                raise ValueError(
                    f"max_tokens={max_tokens} leaves nothing of "
                    f"{row.trajectory.domain}: its first sequence has "
                    f"{num_tokens} tokens; raise the limit"
                )
            break
        rows.append(row)
        if len(rows) == max_sequences:
            break
    return rows


def _rows(
    trajectory: Trajectory,
    turn_tokenizer: TurnTokenizer,
    export: Export,
    context: Callable[[str, str], AgentContext],
) -> Iterator[_Row]:
    agent = context(trajectory.domain, trajectory.task_id)
    try:
        conversation = agent_conversation(
            agent.system_prompt,
            agent.tools,
            trajectory.messages,
            solo=find_domain(trajectory.domain).solo,
        )
    except ValueError as error:
        raise ValueError(f"episode {trajectory.episode}: {error}") from error
    turns = turn_tokenizer.turns(conversation, trajectory.episode)
    if export is Export.CONCAT:
        if turns:
            yield _Row(trajectory, len(turns) - 1, *conversation_sequence(turns))
        return
    for call in range(len(turns)):
        yield _Row(trajectory, call, *call_sequence(turns[: call + 1]))


def _batch(rows: Sequence[_Row]) -> SequenceBatch:
    trajectories, calls, tokens, masks = zip(*rows, strict=True)
    return SequenceBatch(
        tokens=np.concatenate(tokens),
        loss_mask=np.concatenate(masks),
        offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        domain=np.array([t.domain for t in trajectories]),
        task_id=np.array([t.task_id for t in trajectories]),
        trial=np.array([t.trial for t in trajectories], np.int32),
        episode=np.array([t.episode for t in trajectories], np.int32),
        call=np.array(calls, np.int32),
        reward=np.array([t.reward for t in trajectories], np.float32),
    )


def _save_areal(batch: SequenceBatch, path: Path) -> None:
    from recipes.tau2.recorded import areal_batch  # needs torch

    areal_batch.save_areal_batch(areal_batch.areal_batch(batch), path)


_WRITERS: dict[str, Callable[[SequenceBatch, Path], None]] = {
    ".npz": save_sequences,
    ".safetensors": _save_areal,
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.tau2.replay",
        description="Turn recorded tau2 episodes into token sequences with loss masks.",
    )
    add = parser.add_argument
    add("--trajectories", required=True, type=Path, help="JSONL, one episode per line")
    add("--domain", nargs="+", choices=list(DOMAINS), help="default: all in the file")
    add("--export", type=Export, choices=list(Export), default="individual")
    add("--template", type=Template, choices=list(Template), default="plain")
    add(
        "--out",
        type=Path,
        help="file to write: .npz (flat arrays), or .safetensors (AReaL's batch)",
    )
    add("--tokenizer", help="directory or hub name; default: Qwen3's, without a hub")
    add("--think-tokens", type=int, default=200, help="a call, with --template think")
    add("--seed", type=int, default=0, help="of the filler thoughts")
    add("--max-sequences", type=int, help="of a domain")
    add("--max-tokens", type=int, help="of a domain's sequences in all")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.out is not None and args.out.suffix not in _WRITERS:
            raise ValueError(
                f"--out {args.out}: expected a name that ends in "
                f"{' or '.join(_WRITERS)}"
            )
        trajectories = read_trajectories(args.trajectories, args.domain)
        batch = replay(
            trajectories,
            load_tokenizer(args.tokenizer),
            args.export,
            args.template,
            think_tokens=args.think_tokens,
            seed=args.seed,
            max_sequences=args.max_sequences,
            max_tokens=args.max_tokens,
            context=agent_context,
        )
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            _WRITERS[args.out.suffix](batch, args.out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown_table(sharing_statistics(batch)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
