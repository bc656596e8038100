"""What `auto` would choose for a named model: from its configuration, without weights.

The engine asks the same functions once its model is loaded (engine/oom_retry.py). There
the largest term, what autograd saves, is measured; here it is predicted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from areal_dta.doctor.machine import Finding, Machine
from areal_dta.executor import ExecutorConfig, UnsupportedModelError
from areal_dta.executor.fused_logprobs import logit_sizes
from areal_dta.executor.last_layer import decoder_layers
from areal_dta.executor.memory.budget import (
    MAX_BLOCK_TOKENS,
    MIN_CHOSEN_BLOCK,
    choose_budgets,
    needs_masked_softmax,
    pending_bytes,
    predict_memory,
    usable_memory,
)
from areal_dta.executor.model_refusals import check_unloaded_model

PATHS = (8192, 16384, 32768)
_RANKS = (1, 8)
_REDUCE_BYTES = 4
_LAYERWISE_FACTOR = 4
"""Times the largest block where each block gathers all parameters."""
# Memory that a process finds free on a card: the CUDA context and NCCL take a part.
_STATED_CARDS = {"H100 80 GB": 78.0, "H200 141 GB": 138.0}
_USABLE = 0.85


@dataclass(frozen=True, slots=True)
class Chosen:
    """Budgets for one card, number of ranks, way of gathering and length of paths."""

    card: str
    ranks: int
    reshard: str
    path_tokens: int
    block_tokens: int
    retain_tokens: int
    recompute: str
    """What is run again inside a block: see ``actor.dta.recompute``."""
    predicted_bytes: float
    usable_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What is known of a model, and what a run with it would take."""

    name: str
    architecture: str = ""
    num_parameters: int = 0
    dtype: str = ""
    kernels: str = ""
    """Which attention kernels serve its layers."""
    chosen: tuple[Chosen, ...] = ()
    findings: list[Finding] = field(default_factory=list)


def model_choice(name: str, machine: Machine) -> ModelChoice:
    """Return what `auto` would choose on this machine's card; on a CPU also what it
    would choose on cards of 80 and 141 GB."""
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        text = f"--model {name}: its configuration cannot be read ({reason})"
        return ModelChoice(name, findings=[Finding(True, text)])

    kind = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    try:
        check_unloaded_model(config)
    except UnsupportedModelError as error:
        return ModelChoice(name, kind, findings=[Finding(True, str(error))])
    except ValueError as error:  # noise or dropout: a setting can switch it off
        findings = [Finding(False, str(error))]
    else:
        findings = []
    on_gpu = bool(machine.cards)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows = _rows(config, machine)
    for card in dict.fromkeys(row.card for row in rows):
        if not any(row.fits for row in rows if row.card == card):
            text = f"{kind} does not fit {card} at any length of paths"
            findings.append(Finding(card == "this card", text))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return ModelChoice(
        name=name,
        architecture=kind,
        num_parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        kernels=_kernels(config, "cuda" if on_gpu else "cpu", dtype),
        chosen=tuple(rows),
        findings=findings,
    )


def _kernels(config: Any, device: str, dtype: torch.dtype) -> str:
    flash = f"flash_{device}"
    if needs_masked_softmax(config.get_text_config(), device, dtype):
        return f"{flash}; masked_softmax for windows in branches, soft caps or fp32"
    return flash


def _rows(config: Any, machine: Machine) -> list[Chosen]:
    rows = []
    if machine.cards:
        card = machine.cards[0]
        cards = {"this card": (card.free_bytes * _USABLE, "cuda")}
        ranks = tuple(dict.fromkeys((1, len(machine.cards))))
    else:
        cards = {"this CPU": (usable_memory(torch.device("cpu")), "cpu")}
        cards |= {
            name: (free * 2**30 * _USABLE, "cuda")
            for name, free in _STATED_CARDS.items()
        }
        ranks = _RANKS
    for name, (usable, device) in cards.items():
        for num_ranks in ranks if device == "cuda" else (1,):
            for path_tokens in PATHS:
                of_ways = [
                    _chosen(config, name, device, usable, num_ranks, way, path_tokens)
                    for way in (("step", "block") if num_ranks > 1 else ("step",))
                ]
                # Gathering once per step is faster, where it leaves whole blocks.
                fitting = [chosen for chosen in of_ways if chosen.fits]
                rows.append((fitting or of_ways)[0])
    return rows


def _chosen(
    config: Any,
    card: str,
    device: str,
    usable_bytes: float,
    num_ranks: int,
    reshard: str,
    path_tokens: int,
) -> Chosen:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    memory = predict_memory(model, ExecutorConfig(), dtype)
    # The model lies on no device; its logits are held as on that of the card.
    chunk, slab = logit_sizes(device, None)
    memory = dataclasses.replace(
        memory, logit_chunk_elements=chunk, logit_slab_elements=slab
    )
    # What is there beside activations: shards, gathered parameters, gradients, Adam.
    groups = _groups(model)
    gathered = sum(group[0] for group in groups)
    is_layerwise = reshard == "block"
    resident = gathered / num_ranks + (gathered if num_ranks > 1 else 0)
    if is_layerwise:
        resident = gathered / num_ranks
    pending = pending_bytes(
        groups,
        sum(p.numel() for p in model.parameters()),
        num_ranks,
        trains=True,
        has_moments=False,
        is_layerwise=is_layerwise,
    )
    largest = MAX_BLOCK_TOKENS[device]
    if is_layerwise and device == "cuda":
        largest *= _LAYERWISE_FACTOR
    budgets = choose_budgets(
        memory,
        usable_bytes - resident - pending,
        path_tokens,
        largest,
        MIN_CHOSEN_BLOCK[device],
        recompute="auto",
    )
    beside = resident + pending
    return Chosen(
        card=card,
        ranks=num_ranks,
        reshard=reshard,
        path_tokens=path_tokens,
        block_tokens=budgets.block_tokens,
        retain_tokens=budgets.retain_tokens,
        recompute=budgets.recompute,
        predicted_bytes=budgets.predicted_bytes + beside,
        usable_bytes=budgets.usable_bytes + beside,
        fits=budgets.fits,
    )


def _groups(model: nn.Module) -> list[tuple[int, int]]:
    """Return bytes of parameters and of their fp32 gradients, as FSDP2 gathers them:
    all outside of the decoder layers first, then each layer."""
    whole = _num_parameters(model)
    counts = [_num_parameters(layer) for layer in decoder_layers(model)]
    itemsize = next(model.parameters()).dtype.itemsize
    return [
        (count * itemsize, count * _REDUCE_BYTES)
        for count in (whole - sum(counts), *counts)
    ]


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
