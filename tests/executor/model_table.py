"""Format and read docs/models.md, the verdicts of `tests.executor.model_sweep`."""

from __future__ import annotations

from collections.abc import Sequence

import transformers

from tests.executor.model_sweep import BLOCK_TOKENS, WINDOW, Verdict

KINDS = ("exact", "refused", "not built", "wrong", "crashed")
TABLE_HEAD = """# Models

What the tree executor does with each type of causal language model that \
Transformers {version} knows. Made by `python scripts/model_table.py` from a tiny \
random model of each type, every option at its default unless named in brackets \
(windows are shortened to {window} tokens, below the length of the sequences).

* **exact**: logprobs, entropies and all gradients are those of one sequence at a time \
under the model's own eager attention, in blocks of {blocks} tokens.
* **refused**: training stops with this message before it changes a number.
* **not built**: Transformers cannot build the type or run it on token ids alone.
* `nemotron_h` is exact up to one chunk of its scan (`chunk_size`): beyond it \
Transformers 5.3 adds states up wrongly on CPUs, and the tree does not do so.

{counts}.

| type | class | verdict | why |
|---|---|---|---|
"""


def table_row(verdict: Verdict) -> str:
    """Return a row of the table of docs/models.md."""
    kind, reason = verdict.kind, verdict.reason
    if kind == "refused":
        reason = reason.replace(f"{verdict.architecture} cannot be trained on", "no")
        reason = reason.removeprefix("no prefix trees: ")
    reason = reason.split("; use the dense engine")[0].split(". Use the dense")[0]
    if len(reason) > 150:
        reason = reason[:150].rsplit(" ", 1)[0] + " …"
    cells = (f"`{verdict.case.name}`", verdict.architecture, kind, reason)
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return docs/models.md."""
    rows = [table_row(verdict) for verdict in verdicts]
    kinds = [row.split(" | ")[2] for row in rows]
    head = TABLE_HEAD.format(
        version=transformers.__version__,
        window=WINDOW,
        blocks=" and ".join(map(str, BLOCK_TOKENS)),
        counts=", ".join(
            f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds
        ),
    )
    return head + "\n".join(rows) + "\n"


def read_table(text: str) -> dict[str, str]:
    """Return the verdict of each name in docs/models.md."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    return {row[0].strip("`"): row[2] for row in rows if row[0].startswith("`")}
