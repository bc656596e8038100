"""PPO engines called with rows of items, as dispatched, instead of whole items.

`RowDispatch` is a mixin; list it before the other bases of an engine. Its methods are
called by the controllers of the collector (which this package does not import): the
``dispatch_*`` methods turn shares into lists of items, which AReaL's own methods take.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.data import Normalization
from torch import Tensor

from areal_dta.areal_fixes.group_normalization import ItemNormalization
from areal_dta.engine.placeholder_rows import call_with_some_rows
from areal_dta.engine.row_share import (
    UNCHANGED,
    Item,
    Share,
    join_pieces,
    narrow,
    widen,
)


class RowDispatch(FSDPEngine):
    """Forward passes, advantages and updates on shares of a batch.

    Every method is collective; a rank may have been sent no rows.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name in ("adv_norm", "reward_norm"):
            if isinstance(getattr(self._algorithm, name, None), Normalization):
                norm = ItemNormalization(getattr(config, name))
                setattr(self._algorithm, name, norm)

    def dispatch_forward(
        self, method: str, items: list[Item], share: str
    ) -> list[Tensor]:
        """Run ``compute_logp`` or ``compute_values`` on a share.

        Returns:
            A piece [n, s] of each item that was sent.
        """
        rows = Share.from_text(share).take_all(items)
        result: list[Tensor] = getattr(self, method)(rows)
        return result

    def dispatch_advantages(self, items: list[Item], width: int) -> list[Item]:
        """Run ``compute_advantages`` on whole items.

        Args:
            width: longest sequence of the whole batch, see `Share`.

        Returns:
            The items without the keys that are left as they are.
        """
        # whole items, the first as wide as the whole batch
        joined = [join_pieces(item) for item in items]
        shapes = [tuple(item["attention_mask"].shape) for item in joined]
        if joined:
            joined[0] = widen(joined[0], width)
        done = self.compute_advantages(joined)
        # back to each item's own width, with the keys that are new
        results = []
        for item, (num_rows, own_width) in zip(done, shapes, strict=True):
            wide = item["attention_mask"].shape[1]
            item = narrow(item, num_rows, wide, own_width)
            results.append({k: v for k, v in item.items() if k not in UNCHANGED})
        return results

    def dispatch_update(self, items: list[Item], share: str) -> None:
        """Run ``ppo_update`` per minibatch; all ranks have the same number of them."""
        parsed = Share.from_text(share)
        items = [join_pieces(item) for item in items]
        with self._one_minibatch():
            for minibatch in range(len(parsed.rows)):
                rows = parsed.take(items, minibatch)
                if rows:
                    rows[0] = widen(rows[0], parsed.width)
                self.ppo_update(rows)

    def compute_advantages(self, items: list[Item]) -> list[Item]:
        """AReaL's, each item normalised over its own rows."""
        norms = [self._algorithm.reward_norm, self._algorithm.adv_norm]
        norms = [norm for norm in norms if isinstance(norm, ItemNormalization)]
        if not items:
            for norm in norms:
                norm.join(self.device)
            return []
        areal: Any = super()
        with ExitStack() as stack:
            for norm in norms:
                stack.enter_context(norm.items(items))
            result: list[Item] = areal.compute_advantages(items)
        return result

    def ppo_update(self, items: list[Item]) -> None:
        areal: Any = super()
        num_minibatches = self._algorithm.config.ppo_n_minibatches
        call_with_some_rows(self, areal.ppo_update, items, num_minibatches)

    def take_block_samples(self) -> list[list[float]]:
        """Return the blocks measured since the last call, of all ranks in turn, as
        rows of ``BlockSample.to_floats``."""
        runner = getattr(self, "runner", None)  # dense engines have none
        own = [] if runner is None else runner.take_block_samples()
        everyone: list[Any] = [None] * dist.get_world_size(self.cpu_group)
        dist.all_gather_object(everyone, own, group=self.cpu_group)
        return [list(row) for rows in everyone for row in rows]

    @property
    def _algorithm(self) -> Any:
        """AReaL's PPOActor or PPOCritic."""
        return getattr(self, "actor", None) or self.critic

    @contextmanager
    def _one_minibatch(self) -> Iterator[None]:
        """Keep AReaL's algorithm from splitting a minibatch again."""
        algorithm = self._algorithm
        config = algorithm.config
        algorithm.config = copy.copy(config)
        algorithm.config.ppo_n_minibatches = 1
        try:
            yield
        finally:
            algorithm.config = config
