"""What a run will do, told before it starts (``--dry-run``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from areal.trainer.dpo_trainer import dpo_modeling_collate_fn
from areal.trainer.rw_trainer import rw_modeling_collate_fn
from areal.utils.data import collate_samples_to_list

from areal_dta.config.resolved import Section
from areal_dta.config.schema import (
    DTAConfig,
    DTAGRPOConfig,
)
from areal_dta.report.batch_sharing import batch_meter
from areal_dta.startup.prepare import Job

SAMPLED_PROMPTS = 256

_ENGINES = {
    "dta": "prefix-tree engine (dta)",
    "fsdp": "AReaL's dense engine (fsdp)",
    "megatron": "AReaL's Megatron engine",
    "archon": "AReaL's Archon engine",
    "local": "embedded server (local)",
    "sglang": "SGLang",
    "vllm": "vLLM",
}


@dataclass(frozen=True, slots=True)
class Sharing:
    """Expected sharing of one training batch, at its least."""

    prompt_tokens: float
    """Mean length of a prompt."""
    sharing_ratio: float
    predicted_saving: float | None


def least_sharing(config: DTAGRPOConfig, prompts: list[list[int]]) -> Sharing:
    """A lower bound: answers of full length that share nothing but their prompt.

    Shorter answers, and answers with equal beginnings, share more; so do prompts
    with a common system prompt, which is left out here.
    """
    answers = config.gconfig.max_new_tokens
    sequences: list[np.ndarray] = []
    mark = max((max(p) for p in prompts), default=0) + 1  # no prompt has this token
    for number, prompt in enumerate(prompts[: config.train_dataset.batch_size]):
        for sample in range(config.gconfig.n_samples):
            # One token tells prompts apart, so that nothing is shared between them.
            own = np.array([mark + number, *prompt[1:]], dtype=np.int64)
            tail = np.full(answers, mark + len(prompts) + sample, dtype=np.int64)
            sequences.append(np.concatenate([own, tail]))
    shape = batch_meter(config).measure_sequences(sequences)
    return Sharing(
        prompt_tokens=float(np.mean([len(p) for p in prompts])),
        sharing_ratio=shape.sharing_ratio,
        predicted_saving=shape.predicted_saving,
    )


def sample_prompts(job: Job) -> list[list[int]]:
    """Token ids of the first prompts of the data set."""
    prompts = []
    for row in islice(job.train_dataset, SAMPLED_PROMPTS):
        text = job.tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, tokenize=False
        )
        prompts.append(job.tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def num_parameters(model_path: str) -> int | None:
    """Parameters of a local checkpoint, read from its safetensors headers."""
    total = 0
    for file in Path(model_path).glob("*.safetensors"):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        total += sum(
            int(np.prod(entry["shape"]))
            for k, entry in header.items()
            if k != "__metadata__"
        )
    return total or None


def plan_text(job: Job) -> str:
    """The plan, one aligned line an item."""
    config = job.config
    lines = {"training": _training(job.run.actor)}
    for section in job.run.models[1:]:
        lines[section.name.removesuffix(".train")] = _training(section)
    if isinstance(config, DTAGRPOConfig):
        assert job.run.rollout is not None
        lines |= {
            "rollouts": _rollouts(job.run.rollout),
            "model": _model(config),
            "data": f"{config.train_dataset.path}, {len(job.train_dataset):,} prompts",
            "steps": f"{job.num_steps} of {config.train_dataset.batch_size} prompts x "
            f"{config.gconfig.n_samples} samples, "
            f"at most {config.gconfig.max_new_tokens} new tokens",
        }
        if "messages" in job.train_dataset.column_names:  # an agent's may have none
            lines |= _sharing(config, sample_prompts(job))
    else:
        what = "examples" if config.algorithm == "sft" else "pairs"
        lines |= {
            "model": _model(config),
            "data": f"{config.train_dataset.path}, {len(job.train_dataset):,} {what}",
            "steps": f"{job.num_steps} of {config.train_dataset.batch_size} {what}",
            **_first_batch(job),
        }
    lines["files"] = str(job.run_dir)
    texts = [f"  {title:<9} {text}" for title, text in lines.items()]
    return "\n".join([*texts, *(f"  {'note':<9} {note}" for note in job.notes)])


def first_batch(job: Job) -> list[dict[str, torch.Tensor]]:
    """The first examples of the data set, as AReaL's trainers collate them."""
    rows = list(islice(job.train_dataset, job.config.train_dataset.batch_size))
    items: list[dict[str, torch.Tensor]]
    if job.config.algorithm == "sft":
        items = collate_samples_to_list(rows)
    elif job.config.algorithm == "dpo":
        items = dpo_modeling_collate_fn(rows)
    else:
        items = rw_modeling_collate_fn(rows)
    return items


def _first_batch(job: Job) -> dict[str, str]:
    shape = batch_meter(job.config).measure(first_batch(job))
    lines = {
        "sharing": f"{shape.sharing_ratio:.2f} sequence tokens per tree token "
        f"(the first {job.config.train_dataset.batch_size} of the data set)"
    }
    if shape.predicted_saving is not None:
        percent = f"{100 * shape.predicted_saving:.0f} %"
        lines["saving"] = f"{percent} of the dense engine's training FLOPs"
    return lines


def _training(section: Section) -> str:
    backend = section.backend
    text = f"{_ENGINES[backend.engine]} on {_processes(backend.num_ranks)}"
    if backend.engine == "dta":
        options = section.config.dta
        kept = f"graphs of {options.retain_tokens} tokens kept"
        if options.retain_tokens is None:
            kept = "all graphs kept"
        elif options.retain_tokens == "auto":
            kept = "graphs kept as memory allows"
        size = (
            "as large as memory allows"
            if options.block_tokens == "auto"
            else f"of {options.block_tokens} tokens"
        )
        text += f", blocks {size}, {kept}"
    return text


def _rollouts(rollout: Section) -> str:
    backend = rollout.backend
    age = rollout.config.max_head_offpolicyness
    versions = "version" if age == 1 else "versions"
    return (
        f"{_ENGINES[backend.engine]} on {_processes(backend.num_ranks)}, "
        f"at most {age} {versions} old"
    )


def _model(config: DTAConfig) -> str:
    count = num_parameters(config.actor.path)
    size = f", {count / 1e6:,.2f} M parameters" if count else ""
    return f"{config.actor.path}{size}, {config.actor.dtype}"


def _sharing(config: DTAGRPOConfig, prompts: list[list[int]]) -> dict[str, str]:
    least = least_sharing(config, prompts)
    lines = {
        "sharing": f"at least {least.sharing_ratio:.2f} sequence tokens per tree token "
        f"(prompts of {least.prompt_tokens:.0f} tokens, answers of full length that "
        "share nothing)"
    }
    if least.predicted_saving is not None:
        percent = f"{100 * least.predicted_saving:.0f} %"
        lines["saving"] = f"at least {percent} of the dense engine's training FLOPs"
    return lines


def config_text(job: Job) -> str:
    """The resolved configuration without the schema's defaults, as YAML."""
    from omegaconf import OmegaConf

    container: Any = OmegaConf.to_container(job.composed.config, resolve=True)
    return OmegaConf.to_yaml(OmegaConf.create(container))


def _processes(count: int) -> str:
    return f"{count} {'process' if count == 1 else 'processes'}"
