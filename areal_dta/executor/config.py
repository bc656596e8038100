"""Options of the executor, and the counts that it reports."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from areal_dta.schedule import DEFAULT_BLOCK_TOKENS, Schedule
from areal_dta.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """How the tree is traversed. Only ``temperature`` changes results beyond rounding.

    Raises:
        ValueError: a value is out of range.
    """

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    """Maximum number of tokens per model call."""
    retain_tokens: int | None = None
    """Maximum number of tokens whose autograd graph may wait for the backward: 0 keeps
    none and recomputes (least memory), None keeps all."""
    temperature: float = 1.0
    """Logits are divided by it before the softmax."""
    kernel: str = "auto"
    """Attention kernel: ``auto`` picks by device and dtype; others are named in
    ``executor.kernels.KERNELS``."""

    logit_chunk_elements: int | None = None
    """Maximum number of logits held at a time; None: `CHUNK_ELEMENTS` of the device."""
    fragments: str = "packed"
    """``packed`` fills blocks; ``node`` runs one tree node per block, to compare."""

    whole_last_layer: bool = False
    """Run the last layer on all tokens, not on needed outputs alone, to compare."""
    recompute: str = "none"
    """What of a graph is left out, and run again in the backward: ``none``; ``mlp``,
    MLPs and norms, in all of them; ``auto``, in those graphs that wait for their
    backward where that saves time within ``retain_tokens``."""

    fused_layers: str = "auto"
    """RMSNorm, SwiGLU and rotary embeddings as one Triton kernel each: ``auto``, on a
    GPU, those that agree with the model's own layers; ``on``, all; ``off``, none."""
    router_load: bool = False
    """Count the tokens of each expert of a mixture; see ``expert_load``."""
    attention_backend: InitVar[str | None] = None
    """Deprecated: the name of ``kernel`` in 0.1."""

    def __post_init__(self, attention_backend: str | None) -> None:
        kernel = attention_backend or self.kernel
        if kernel == "reference":  # its name in 0.1
            kernel = "masked_softmax"
        object.__setattr__(self, "kernel", kernel)
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens}; expected at least 1")
        if self.retain_tokens is not None and self.retain_tokens < 0:
            raise ValueError(
                f"retain_tokens={self.retain_tokens}; expected None (keep all graphs) "
                "or a number >= 0"
            )
        if self.fragments not in ("packed", "node"):
            raise ValueError(f"fragments={self.fragments!r}; expected packed or node")
        if self.recompute not in ("none", "mlp", "auto"):
            raise ValueError(
                f"recompute={self.recompute!r}; expected none, mlp or auto"
            )
        if self.fused_layers not in ("auto", "on", "off"):
            raise ValueError(
                f"fused_layers={self.fused_layers!r}; expected auto, on or off"
            )
        if self.logit_chunk_elements is not None and self.logit_chunk_elements < 1:
            raise ValueError(
                f"logit_chunk_elements={self.logit_chunk_elements}; expected at least 1"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}; expected a number > 0")


@dataclass(frozen=True, slots=True)
class ExecutionStats:
    """Counts of one traversal."""

    num_sequences: int
    num_sequence_tokens: int
    num_tree_tokens: int
    num_blocks: int
    num_computed_tokens: int
    """Tree tokens that needed outputs depend on: each is run at least once."""
    num_rows: int
    """Positions with a needed output, projected onto the vocabulary."""
    num_forward_tokens: int
    """Tokens run forward, recomputed ones counted twice."""
    num_recomputed_tokens: int
    peak_graph_tokens: int
    peak_kv_tokens: int
    expert_load: tuple[tuple[int, ...], ...] = ()
    """Tokens of each expert, per layer with experts; with ``router_load`` only. A tree
    token counts once per sequence through it."""
    router_loss: float = 0.0
    """Weighted sum of the sequences' router losses, part of the loss; with
    ``router_weights`` only."""

    @classmethod
    def of(cls, tree: PrefixTree, schedule: Schedule) -> ExecutionStats:
        return cls(
            num_sequences=tree.num_sequences,
            num_sequence_tokens=tree.num_sequence_tokens,
            num_tree_tokens=tree.num_tree_tokens,
            num_blocks=schedule.num_blocks,
            num_computed_tokens=schedule.cut.needed.num_computed_tokens,
            num_rows=schedule.cut.needed.num_outputs,
            num_forward_tokens=schedule.num_forward_tokens,
            num_recomputed_tokens=schedule.num_recomputed_tokens,
            peak_graph_tokens=schedule.peak_graph_tokens,
            peak_kv_tokens=schedule.peak_kv_tokens,
        )

    @property
    def sharing_ratio(self) -> float:
        if self.num_tree_tokens == 0:
            return 1.0
        return self.num_sequence_tokens / self.num_tree_tokens
