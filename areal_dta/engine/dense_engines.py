"""Dense baselines: AReaL's FSDP engines with correct masking of packed sequences.

AReaL packs a micro-batch into one row and relies on flash-attention's ``cu_seqlens`` to
keep its sequences apart. PyTorch's sdpa and eager attention silently ignore them: every
sequence after the first sees the ones before it (logprobs wrong by 0.1 to 0.3). Here
they are kept apart under those too, with one attention call per sequence; with flash
attention the engine is AReaL's, unchanged. Layers that carry a state from token to
token (linear attention, state-space layers, short convolutions) know nothing of
``cu_seqlens``: they run one sequence per call under any attention.

AReaL's engine also makes as many micro-batches on every rank as on the rank with the
most, none of them empty. Actors and critics here take any number of rows per rank:
placeholder rows make up for those that are missing. On a GPU, norms, SwiGLU and rotary
embeddings run as the same fused kernels as in the tree engine (``dta.fused_layers``).
"""

# T = packed tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from areal.engine.fsdp_engine import (
    FSDPDPOEngine,
    FSDPLMEngine,
    FSDPPPOActor,
    FSDPPPOCritic,
)
from areal.utils.data import (
    DEFAULT_MAX_TOKENS_PER_MB,
    MicroBatchSpec,
    allocate_balanced_mbs,
    concat_padded_tensors,
    tensor_container_to,
)
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from areal_dta.areal_fixes.training_engines import PairRewards, RecoverableEngine
from areal_dta.engine.batch import load_batch
from areal_dta.engine.loss import traits_of
from areal_dta.engine.placeholder_rows import placeholder_rows, template_of
from areal_dta.engine.row_dispatch import RowDispatch
from areal_dta.engine.row_share import Item
from areal_dta.engine.setting_checks import option
from areal_dta.engine.statistics import LossStatistics
from areal_dta.engine.watch.skipped_steps import report_skipped_step
from areal_dta.executor.checks.multimodal import (
    freeze_other_parts,
    is_multimodal,
    text_inputs,
)
from areal_dta.executor.checks.state_layers import layers_with_state
from areal_dta.executor.fused import FusedLayers

PACKED_ATTENTION = "areal_dta_packed_sdpa"
_IGNORE_PACKING = ("sdpa", "eager")


class DenseEngine(RecoverableEngine):
    """Mixin; list it before AReaL's class so that its methods win.

    Every call is collective, as in AReaL.
    """

    takes_any_rows = False
    """Whether ranks may have any number of rows: for actors and critics."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.is_vision_model = is_multimodal(self.model_config)  # decides how it loads

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        super().initialize(*args, **kwargs)
        # As the tree engine does, so that the two compare. The model is sharded now.
        fused = FusedLayers(self.model, option(self.config, "fused_layers"))
        fused.install()
        if fused.replaced or fused.left:
            self.logger.info(f"dta.fused_layers={fused}")

    def _create_device_model(self) -> None:
        super()._create_device_model()
        if self.config.attn_impl in _IGNORE_PACKING:
            self.model.set_attn_implementation(PACKED_ATTENTION)
        if is_multimodal(self.model_config):
            freeze_other_parts(self.model)
            # AReaL does not tell the model that all of its tokens are text
            self.model.register_forward_pre_hook(_say_all_is_text, with_kwargs=True)
        if names := split_packed_states(self.model):
            self.logger.info(
                f"{len(names)} layers of {type(self.model).__name__} carry a state "
                f"from token to token ({names[0]}, ...): each runs one sequence per "
                "call, since a packed call would carry it into the next sequence"
            )

    def compute_logp(self, items: list[Item]) -> list[Tensor]:
        return self._forward_items("compute_logp", items)

    def compute_values(self, items: list[Item]) -> list[Tensor]:
        return self._forward_items("compute_values", items)

    def train_batch(
        self, input_: Item, loss_fn: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        if not self.takes_any_rows:
            stats = dict(super().train_batch(input_, loss_fn, *args, **kwargs))
            self._report_skipped(input_, loss_fn, stats)
            return stats
        rows = self._with_enough_rows(input_)
        num_calls = 0

        @functools.wraps(loss_fn)
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return loss_fn(*args, **kwargs)

        result: dict[str, float] = super().train_batch(rows, counted, *args, **kwargs)
        if not num_calls:  # AReaL leaves it out where nothing has weight
            self._call_silently(loss_fn, rows)
        self._report_skipped(input_, loss_fn, result)
        return result

    def _report_skipped(
        self, input_: Item, loss_fn: Callable[..., Tensor], stats: dict[str, float]
    ) -> None:
        if not stats.get("update_successful", 1.0):
            rule = traits_of(loss_fn).needed_outputs
            batch = load_batch(input_, self.config.mb_spec)
            report_skipped_step(self, batch, rule.mask if rule else None, stats)

    def forward_batch(self, input_: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.takes_any_rows or not isinstance(input_, dict):
            return super().forward_batch(input_, *args, **kwargs)
        num_rows = len(input_["attention_mask"])
        rows = self._with_enough_rows(input_)
        return super().forward_batch(rows, *args, **kwargs)[:num_rows]

    def _forward_items(self, method: str, items: list[Item]) -> list[Tensor]:
        call = getattr(super(), method)
        if items or not self.takes_any_rows:
            return list(call(items))
        row = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        call([{"input_ids": row, "attention_mask": torch.ones_like(row).bool()}])
        return []

    @torch.no_grad()
    def _call_silently(self, loss_fn: Callable[..., Tensor], rows: Item) -> None:
        """Record the keys of the loss's statistics, which all ranks export alike."""
        template = template_of(rows)
        assert template is not None
        batch = load_batch(placeholder_rows(template, 1), MicroBatchSpec())
        mb_input = batch.pack([0], self.device)
        zero = torch.zeros(1, device=self.device)
        with LossStatistics().silent_call():
            if self.config.is_critic:
                loss_fn(zero[:, None], mb_input)
            else:
                vocab = {"vocab_min_logits": zero, "vocab_max_logits": zero}
                loss_fn(zero, zero, mb_input, **vocab)

    def _with_enough_rows(self, rows: Item) -> Item:
        """Return as many rows as there will be micro-batches, at least. Collective."""
        lengths = rows["attention_mask"].sum(-1).long().tolist()
        limit = self.config.mb_spec.max_tokens_per_mb or DEFAULT_MAX_TOKENS_PER_MB
        spec = MicroBatchSpec.new(
            self.config.mb_spec,
            n_mbs=min(self.config.mb_spec.n_mbs or 1, len(lengths)),
            max_tokens_per_mb=limit,
        )
        # the number of micro-batches: on every rank that of the rank with the most
        counts: list[Any] = [None] * dist.get_world_size(self.cpu_group)
        own = len(allocate_balanced_mbs(spec, lengths))
        wanted = max(own, self.config.mb_spec.n_mbs or 1)
        dist.all_gather_object(counts, wanted, group=self.cpu_group)
        num_missing = max(counts) - len(lengths)
        if num_missing <= 0:
            return rows
        # append placeholders; values that they have no key for stay as they are
        template = template_of(rows)
        assert template is not None
        # two tokens: AReaL's critic squeezes a width of one away
        missing = placeholder_rows(template, num_missing, width=2)
        missing = tensor_container_to(missing, self.device)
        others = {k: v for k, v in rows.items() if k not in template}
        padded = {k: v for k, v in rows.items() if k in template}
        return {**others, **concat_padded_tensors([padded, missing])}


class DensePPOActor(RowDispatch, DenseEngine, FSDPPPOActor):
    """The dense twin of `DTAPPOActor`: the same results, every sequence computed."""

    takes_any_rows = True


class DensePPOCritic(RowDispatch, DenseEngine, FSDPPPOCritic):
    """The dense twin of `DTAPPOCritic`."""

    takes_any_rows = True


class DenseLMEngine(DenseEngine, FSDPLMEngine):
    """The dense twin of `DTALMEngine`."""


class DenseDPOEngine(DenseEngine, FSDPDPOEngine):
    """The dense twin of `DTADPOEngine`."""


class DenseRWEngine(DenseEngine, PairRewards):
    """The dense twin of `DTARWEngine`."""


def split_packed_states(model: nn.Module) -> list[str]:
    """Make layers that carry a state run once per packed sequence; return their names.

    The other layers still run on all tokens at once.
    """
    layers = layers_with_state(model)
    if not layers:
        return []
    lengths: list[int] = []  # of the sequences in the call under way

    def learn(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        starts = kwargs.get("cu_seq_lens_q")
        lengths[:] = [] if starts is None else starts.diff().tolist()
        return args, _without_mask(kwargs)

    model.register_forward_pre_hook(learn, with_kwargs=True)
    layer: Any
    for layer in layers.values():
        layer.forward = functools.partial(_run_apart, layer.forward, lengths)
    return list(layers)


def _run_apart(
    forward: Callable[..., Any], lengths: list[int], *args: Any, **kwargs: Any
) -> Any:
    """Call a layer once per packed sequence; tensors [1, T, ...] in, [1, T, D] out."""
    if len(lengths) < 2:
        return forward(*args, **kwargs)
    num_tokens, outputs, start = sum(lengths), [], 0
    hidden = args[0] if args else next(iter(kwargs.values()))
    if hidden.shape[:2] != (1, num_tokens):
        raise ValueError(
            f"a layer with a state got {list(hidden.shape)} for packed sequences of "
            f"{num_tokens} tokens in all; expected [1, {num_tokens}, size]: sequence "
            "parallelism cannot run such layers"
        )
    for length in filter(None, lengths):
        end = start + length

        def cut(x: Any, start: int = start, end: int = end) -> Any:
            if isinstance(x, Tensor) and x.shape[:2] == (1, num_tokens):
                return x[:, start:end]
            if isinstance(x, Tensor) and x.shape == (num_tokens,):
                return x[: end - start]  # positions in a cache, which start at 0
            return x

        outputs.append(
            forward(*map(cut, args), **{k: cut(x) for k, x in kwargs.items()})
        )
        start = end
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    firsts, others = zip(*((x[0], x[1:]) for x in outputs), strict=True)
    return torch.cat(firsts, dim=1), *others[0]


def _say_all_is_text(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if "input_ids" in kwargs:
        kwargs = {**text_inputs(module, kwargs["input_ids"]), **kwargs}
    return args, _without_mask(kwargs)


def _without_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop AReaL's dictionary of no masks, which few models can read."""
    if isinstance(kwargs.get("attention_mask"), dict):
        return {**kwargs, "attention_mask": None}
    return kwargs


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run sdpa on each packed sequence. query [1, N, T, H]; key, value [1, K, T, H].

    Raises:
        ValueError: the call is not one packed row, or a window would be ignored.
    """
    if cu_seq_lens_q is None or attention_mask is not None or query.shape[0] != 1:
        raise ValueError(
            f"packed attention got a batch of {query.shape[0]}, cu_seq_lens_q "
            f"{'missing' if cu_seq_lens_q is None else 'given'}, attention_mask "
            f"{'missing' if attention_mask is None else 'given'}; expected AReaL's "
            "packed micro-batches: one row with cu_seq_lens_q and no mask"
        )
    lengths = cu_seq_lens_q.diff().tolist()
    if sliding_window is not None and max(lengths) > sliding_window:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens exceeds sliding_window="
            f"{sliding_window}, which sdpa ignores; use attn_impl=flash_attention_2"
        )
    parts = zip(
        query.split(lengths, dim=2),
        key.split(lengths, dim=2),
        value.split(lengths, dim=2),
        strict=True,
    )
    outputs = [
        sdpa_attention_forward(module, q, k, v, None, **kwargs)[0]
        for q, k, v in parts
        if q.shape[2]
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(PACKED_ATTENTION, _packed_sdpa)
