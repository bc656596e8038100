"""What a run would do, told before it starts (``--dry-run``)."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from areal.trainer.dpo_trainer import dpo_modeling_collate_fn
from areal.trainer.rw_trainer import rw_modeling_collate_fn
from areal.utils.data import collate_samples_to_list
from omegaconf import OmegaConf
from safetensors import safe_open

from areal_dta.config.redaction import redacted
from areal_dta.config.resolved import Section
from areal_dta.config.schema import DTAConfig, DTAGRPOConfig
from areal_dta.report.batch_sharing import BatchShape, batch_meter
from areal_dta.startup.prepare import PreparedRun

MAX_SAMPLED_PROMPTS: Final = 256

_ENGINES = {
    "dta": "prefix-tree engine (dta)",
    "fsdp": "dense twin (fsdp: AReaL's engine, our dispatch, norms and minibatches)",
    "areal-fsdp": "AReaL's own engine and controller (areal-fsdp)",
    "megatron": "AReaL's Megatron engine",
    "archon": "AReaL's Archon engine",
    "local": "embedded server (local)",
    "sglang": "SGLang",
    "vllm": "vLLM",
}


def dry_run_text(run: PreparedRun) -> str:
    """Return the resolved configuration as YAML, and what the run would do."""
    resolved = OmegaConf.to_container(run.composed.config, resolve=True)
    config = OmegaConf.to_yaml(OmegaConf.create(redacted(resolved)))
    head = f"# {run.composed.file}, resolved; AReaL's defaults are not shown"
    return "\n".join([head, config, "plan", plan_text(run)])


def plan_text(run: PreparedRun) -> str:
    """Return what the run would do, one aligned line per item."""
    config = run.config
    lines = {"training": _training(run.resolved.actor)}
    for model in run.resolved.models[1:]:
        lines[model.name.removesuffix(".train")] = _training(model)
    if run.resolved.rollout is not None:
        lines["rollouts"] = _rollouts(run.resolved.rollout)
    lines["model"] = _model(config)
    batch_size, shape = config.train_dataset.batch_size, None
    if isinstance(config, DTAGRPOConfig):
        examples, bound = "prompts", "at least "
        samples = (
            f" x {config.gconfig.n_samples} samples, "
            f"at most {config.gconfig.max_new_tokens} new tokens"
        )
        if "messages" in run.train_dataset.column_names:  # an agent's may have none
            prompts = sample_prompts(run)
            shape = minimum_sharing(config, prompts)
            tokens = np.mean([len(prompt) for prompt in prompts])
            measured = (
                f"prompts of {tokens:.0f} tokens, answers of full length that share "
                "nothing"
            )
    else:
        examples = "examples" if config.algorithm == "sft" else "pairs"
        bound = samples = ""
        shape = batch_meter(config).measure(first_batch(run))
        measured = f"the first {batch_size} of the data set"
    lines["data"] = (
        f"{config.train_dataset.path}, {len(run.train_dataset):,} {examples}"
    )
    lines["steps"] = f"{run.num_steps} of {batch_size} {examples}{samples}"
    if shape is not None:
        ratio = f"{bound}{shape.sharing_ratio:.2f}"
        lines["sharing"] = f"{ratio} sequence tokens per tree token ({measured})"
    if shape is not None and shape.predicted_saving is not None:
        percent = f"{bound}{100 * shape.predicted_saving:.0f} %"
        lines["saving"] = f"{percent} of the dense engine's training FLOPs"
    lines["files"] = str(run.run_dir)
    texts = [f"  {title:<9} {text}" for title, text in lines.items()]
    return "\n".join([*texts, *(f"  {'note':<9} {note}" for note in run.notes)])


def minimum_sharing(config: DTAGRPOConfig, prompts: list[list[int]]) -> BatchShape:
    """Measure a batch whose answers have full length and share only their prompt.

    A lower bound: shorter answers, and answers with equal beginnings, share more; so do
    prompts with a common system prompt, which is left out here.
    """
    sequences: list[np.ndarray] = []
    unused = max((max(p) for p in prompts), default=0) + 1  # no prompt has this token
    for prompt_id, prompt in enumerate(prompts[: config.train_dataset.batch_size]):
        # Each prompt begins with its own token: nothing is shared between prompts.
        distinct = [unused + prompt_id, *prompt[1:]]
        for sample in range(config.gconfig.n_samples):
            answer = [unused + len(prompts) + sample] * config.gconfig.max_new_tokens
            sequences.append(np.array(distinct + answer, dtype=np.int64))
    return batch_meter(config).measure_sequences(sequences)


def sample_prompts(run: PreparedRun) -> list[list[int]]:
    """Return the token ids of the first prompts of the data set."""
    prompts = []
    for example in islice(run.train_dataset, MAX_SAMPLED_PROMPTS):
        text = run.tokenizer.apply_chat_template(
            example["messages"], add_generation_prompt=True, tokenize=False
        )
        prompts.append(run.tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def num_parameters(model_path: str) -> int | None:
    """Return the number of parameters of a local checkpoint, or None without one."""
    total = 0
    for path in Path(model_path).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:  # reads headers only
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]
        total += sum(math.prod(shape) for shape in shapes)
    return total or None


def first_batch(run: PreparedRun) -> list[dict[str, torch.Tensor]]:
    """Return the first examples of the data set, as AReaL's trainers collate them."""
    examples = list(islice(run.train_dataset, run.config.train_dataset.batch_size))
    collate = {
        "sft": collate_samples_to_list,
        "dpo": dpo_modeling_collate_fn,
        "rw": rw_modeling_collate_fn,
    }[run.config.algorithm]
    items: list[dict[str, torch.Tensor]] = collate(examples)
    return items


def _training(model: Section) -> str:
    text = _processes(model)
    if model.backend.engine == "dta":
        block, retain = model.config.dta.block_tokens, model.config.dta.retain_tokens
        auto = block == "auto"
        size = "as large as memory allows" if auto else f"of {block} tokens"
        kept = {
            None: "all graphs kept",
            "auto": "graphs kept as memory allows",
        }.get(retain, f"graphs of {retain} tokens kept")
        text += f", blocks {size}, {kept}"
    return text


def _rollouts(server: Section) -> str:
    num_ahead = server.config.max_head_offpolicyness
    batches = "batch" if num_ahead == 1 else "batches"
    return f"{_processes(server)}, at most {num_ahead} {batches} ahead of training"


def _processes(section: Section) -> str:
    count = section.backend.num_ranks
    noun = "process" if count == 1 else "processes"
    return f"{_ENGINES[section.backend.engine]} on {count} {noun}"


def _model(config: DTAConfig) -> str:
    count = num_parameters(config.actor.path)
    size = f", {count / 1e6:,.2f} M parameters" if count else ""
    return f"{config.actor.path}{size}, {config.actor.dtype}"
