"""The projection as Markdown, and as lines while it is made."""

from __future__ import annotations

from typing import Any

_KINDS = (
    "gemm",
    "flash forward",
    "flash backward",
    "tree attention",
    "element-wise",
    "copies",
    "fsdp",
    "loss",
)
_HEAD = """\
# GPU projection

**A projection, not a measurement.** No GPU was at hand. Operators were recorded on fake
CUDA tensors at real sizes and replayed with stated rates. On a card
`bash scripts/gpu_acceptance.sh` measures the same; the rates are to be corrected by it.
The Triton kernels (fused layers, tree attention) are charged what they move and
multiply, at the rates of PyTorch's own kernels: whether they reach those, a card has to
show.

"""


def _way(row: dict[str, Any]) -> str:
    if row["way"] != "tree":
        return str(row["way"])
    choice = "" if row["choice"] == "default" else f", {row['choice']}"
    return f"tree, {row['block_tokens']:,}{choice}"


def one_line(row: dict[str, Any]) -> str:
    """Return a row for a terminal."""
    return (
        f"{row['model']:>5} {_way(row):<34} {row['milliseconds']:>9,.0f} ms "
        f"{row['ratio_to_checkpointing']:>6.2f} "
        f"{row['ratio_to_fused_checkpointing']:>6.2f} "
        f"{row['peak_gigabytes']:>6.1f} GB {row['launches']:>8,}"
    )


def markdown(content: dict[str, Any], raw_data: str = "") -> str:
    """Return the page: rates, ratios and times per kind of kernel.

    Args:
        raw_data: name of the JSON file beside the page.
    """
    card = content["card"]
    lines = [_HEAD, f"`{content['command']}`, torch {content['torch']}\n"]
    if raw_data:
        lines.append(f"Raw data: [{raw_data}]({raw_data}).\n")
    lines.append(
        f"Batch: {content['workload']}, {content['num_sequences']} sequences, "
        f"{content['num_sequence_tokens']:,} tokens, {content['num_tree_tokens']:,} in "
        f"the tree, the longest {content['longest_tokens']:,}, "
        f"{content['num_loss_tokens']:,} with loss. Qwen3, bf16, one {card['name']}.\n"
    )
    lines.append(
        f"Rates: {card['gemm_flops'] / 1e12:.0f} TFLOP/s for matrix products times the "
        f"quantisation of waves, flash attention "
        f"{card['flash_forward_flops'] / 1e12:.0f} and "
        f"{card['flash_backward_flops'] / 1e12:.0f} times occupancy, "
        f"{card['bytes_per_second'] / 1e12:.1f} TB/s, at least "
        f"{card['kernel_seconds'] * 1e6:.1f} µs per kernel; host "
        f"{card['host_forward_seconds'] * 1e6:.0f} µs per launch forward, "
        f"{card['host_backward_seconds'] * 1e6:.0f} backward, "
        f"{card['sync_seconds'] * 1e6:.0f} per synchronisation.\n"
    )
    lines += _ratios(content["rows"])
    lines += ["", "Milliseconds per kind of kernel:", ""]
    lines += _kinds(content["rows"])
    return "\n".join(lines).rstrip() + "\n"


def _ratios(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Dense training is as AReaL does it, and *fused* with the tree's kernels; "
        "`unfused` is the tree without them. `mixed` and `tree` are the kernels "
        "flash_triton and triton_tree, else it is flash attention alone; `mlp` and "
        "`recompute` are recompute=mlp and retain_tokens=0, else all graphs are kept.",
        "",
        "| model | way | ms | to dense | to dense + checkpointing "
        "| to the same, fused | FLOP bound | peak GB | launches | calls |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            row["model"],
            _way(row),
            f"{row['milliseconds']:,.0f}",
            f"{row['ratio_to_dense']:.2f}",
            f"{row['ratio_to_checkpointing']:.2f}",
            f"{row['ratio_to_fused_checkpointing']:.2f}",
            f"{row['flop_bound_with_checkpointing']:.1f}",
            f"{row['peak_gigabytes']:.1f}",
            f"{row['launches']:,}",
            f"{row['num_calls']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _kinds(rows: list[dict[str, Any]]) -> list[str]:
    used = [k for k in _KINDS if any(k in row["milliseconds_by_kind"] for row in rows)]
    lines = [f"| model | way | {' | '.join(used)} | host |"]
    lines.append(f"|---|---|{'---:|' * (len(used) + 1)}")
    for row in rows:
        by_kind = row["milliseconds_by_kind"]
        cells = [row["model"], _way(row)]
        cells += [f"{by_kind.get(kind, 0.0):,.0f}" for kind in used]
        cells.append(f"{row['host_milliseconds']:,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
