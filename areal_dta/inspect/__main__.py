"""Report on rollouts: sharing, where it is lost, and what training them would cost.

    python -m areal_dta.inspect rollouts.jsonl
    python -m areal_dta.inspect rollouts.jsonl --tokenizer ~/models/Qwen3-1.7B \
        --model qwen3-1.7b --memory 40 --ranks 8 --json report.json --html report.html

Exit codes: 0 done, 2 an argument or a file is wrong (one line on stderr says what).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_dta.config.composed import one_line
from areal_dta.inspect.analysis import Analysis, analyse
from areal_dta.inspect.corpus import Corpus, InputError, Limits
from areal_dta.inspect.models import DEFAULT_MODEL, DTYPES, ModelSizes, model_sizes
from areal_dta.inspect.page import page
from areal_dta.inspect.prediction import Budgets
from areal_dta.inspect.rollouts.chats import EXPORTS
from areal_dta.inspect.rollouts.readers import FORMATS, Reader
from areal_dta.inspect.table import WIDTH, print_report

DEFAULT_MAX_TOKENS = 50_000_000


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m areal_dta.inspect",
        description="Report what rollouts share, where sharing is lost, and what "
        "training them would cost.",
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="or a folder of .jsonl")
    add("--tokenizer", metavar="NAME", help="folder or hub name; default: Qwen3's")
    add("--format", choices=FORMATS, help="default: found out")
    add("--export", choices=EXPORTS, default="individual", help="of conversations")
    add(
        "--template-arguments",
        default="{}",
        metavar="JSON",
        help="for the chat template, e.g. '{\"enable_thinking\": false}'",
    )
    add("--skip-malformed", action="store_true", help="leave malformed lines out")
    add("--max-sequences", type=int, help="read no more")
    add(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        help="read no more sequence tokens (default: %(default)s)",
    )

    group = parser.add_argument_group("what it would cost")
    add = group.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help="name, folder with config.json, or sizes (hidden=...,layers=...)",
    )
    add("--dtype", choices=DTYPES, help="default: bfloat16; float32 on a cpu")
    add("--device", choices=("gpu", "cpu"), default="gpu")
    add("--memory", type=float, metavar="GB", help="for activations, keys and values")
    add("--block-tokens", type=int, help="default: the largest that is fast and fits")
    add("--retain-tokens", help="a number or all; default: the most that fits")
    add("--ranks", type=int, default=8)

    group = parser.add_argument_group("what to write")
    add = group.add_argument
    add("--json", type=Path, metavar="FILE")
    add("--html", type=Path, metavar="FILE")
    add("--npz", type=Path, metavar="FILE", help="tokens, for bench_executor.py --data")
    add("--quiet", action="store_true", help="no table")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> Analysis:
    """Read the files and analyse them.

    Raises:
        InputError: an argument or a file is wrong.
    """
    model, budgets = _model(args), _budgets(args)
    for name in ("max_sequences", "max_tokens", "ranks"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise InputError(f"--{option} {value}; expected at least 1")
    try:
        template_arguments = json.loads(args.template_arguments)
    except ValueError as error:
        raise InputError(f"--template-arguments: not JSON ({error})") from error
    if not isinstance(template_arguments, dict):
        raise InputError("--template-arguments: expected a JSON object")
    reader = Reader(
        args.tokenizer,
        args.format,
        args.export,
        args.skip_malformed,
        template_arguments,
    )
    corpus = Corpus()
    corpus.read(reader.read(args.files), Limits(args.max_sequences, args.max_tokens))
    if not len(corpus):
        raise InputError(f"{args.files[0]}: no sequence in it")
    highest = max(int(node.tokens.max()) for node in corpus.tree.nodes)
    if reader.tokenizer is not None and highest >= reader.tokenizer.vocab_size:
        raise InputError(
            f"token id {highest} is beyond the {reader.tokenizer.vocab_size:,} tokens "
            f"of {reader.tokenizer.name}: the ids are another tokenizer's; pass it by "
            "--tokenizer, or inspect files of different tokenizers apart"
        )
    notes = list(reader.notes)
    if reader.num_malformed:
        notes.append(f"{reader.num_malformed:,} malformed lines are left out")
    if highest >= model.vocab_size:
        notes.append(
            f"token id {highest:,} is beyond the vocabulary of {model.name} "
            f"({model.vocab_size:,}): another model's tokens, or mixed tokenizers?"
        )
    source = {
        "files": reader.formats,
        "tokenizer": None if reader.tokenizer is None else reader.tokenizer.name,
        "export": args.export,
        "stopped": corpus.stopped,
        "num_malformed": reader.num_malformed,
        "notes": notes,
    }
    return analyse(corpus, model, budgets, args.ranks, reader.tokenizer, source)


def _model(args: argparse.Namespace) -> ModelSizes:
    dtype = args.dtype or ("bfloat16" if args.device == "gpu" else "float32")
    return model_sizes(args.model, dtype, args.device)


def _budgets(args: argparse.Namespace) -> Budgets:
    retain: int | None = None
    if args.retain_tokens not in (None, "all"):
        if not args.retain_tokens.isdigit():
            raise InputError(
                f"--retain-tokens {args.retain_tokens}; expected all or a number >= 0"
            )
        retain = int(args.retain_tokens)
    if args.block_tokens is not None and args.block_tokens < 1:
        raise InputError(f"--block-tokens {args.block_tokens}; expected at least 1")
    if args.memory is not None and not args.memory > 0:
        raise InputError(f"--memory {args.memory}; expected a number of GB above 0")
    return Budgets(
        memory_bytes=None if args.memory is None else args.memory * 2**30,
        block_tokens=args.block_tokens,
        retain_tokens=retain,
        is_retain_given=args.retain_tokens is not None,
    )


def write(analysis: Analysis, args: argparse.Namespace) -> None:
    """Print the table and write the files that were asked for."""
    if not args.quiet:
        console = Console()
        width = min(WIDTH, console.width) if console.is_terminal else WIDTH
        print_report(analysis.report, Console(width=width, highlight=False))
    if args.json is not None:
        _write(args.json, json.dumps(analysis.report, indent=1, ensure_ascii=False))
    if args.html is not None:
        names = ", ".join(path.name for path in args.files[:3])
        _write(args.html, page(analysis, names))
    if args.npz is not None:
        try:
            analysis.corpus.save(args.npz)
        except OSError as error:
            raise InputError(f"cannot write {args.npz}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    args: Any = parse_args(argv)
    try:
        write(run(args), args)
    except InputError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the table has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        print(
            "error: out of memory; read less with --max-tokens or --max-sequences",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
