"""Flash attention for all that a chain or a whole path is, Triton for a block's tree.

Most of what a branching block reads is its path, which all of its queries see: flash
attention takes that in one call, with five products in its backward where `triton_tree`
takes seven. The block itself is small, and many calls for flash attention, one per
depth with rows gathered for each: `triton_tree` takes it in one. Two terms are merged.
"""

# S = queries, N = query heads

from __future__ import annotations

from torch import Tensor

from areal_dta.executor.kernels.base import AttentionKernel, Gradients, Scoring, Term


class FlashTritonKernel:
    """Serves what both of its kernels do.

    Args:
        flash: for chains and paths.
        tree: for blocks with branches.
    """

    name = "flash_triton"
    takes_path = False

    def __init__(self, flash: AttentionKernel, tree: AttentionKernel) -> None:
        self._flash, self._tree = flash, tree
        self.joins_chains = flash.joins_chains
        self.needs = f"{flash.needs}; and {tree.needs}"

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        return self._flash.supports(q, k, v, scoring) and self._tree.supports(
            q, k, v, scoring
        )

    def forward(self, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        return self._kernel(term).forward(q, term)

    def backward(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Gradients:
        return self._kernel(term).backward(grad_out, q, out, lse, term)

    def _kernel(self, term: Term) -> AttentionKernel:
        shape = term.mask.shape
        return self._flash if shape is None or shape.is_chain else self._tree
