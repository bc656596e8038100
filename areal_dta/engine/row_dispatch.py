"""What a worker's engine is called with when rows, not whole items, are dispatched.

Stands before the other bases of an engine. Its ``dispatch_*`` methods turn shares into
the lists of items that AReaL's own methods take, and are called by the controllers of
``areal_dta.collector.dispatch``; the methods of the algorithm stay as they are.
"""

from __future__ import annotations

import copy
import importlib
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.data import Normalization
from torch import Tensor

from areal_dta.engine.group_normalization import ItemNormalization
from areal_dta.engine.row_share import (
    UNCHANGED,
    Item,
    Share,
    join_pieces,
    narrow,
    widen,
)

if TYPE_CHECKING:
    from areal.api import Scheduler


_KEPT_SAMPLES = 1000  # a rank: what a cost model looks back on


class Dispatched(FSDPEngine):
    """Forward passes and updates on shares of a batch."""

    controller: ClassVar[str]
    """Name of its controller's class in ``areal_dta.collector.dispatch``."""

    @classmethod
    def as_controller(cls, config: Any, scheduler: Scheduler | None) -> Any:
        # upwards, and so by name: only the process of the controller needs it
        dispatch = importlib.import_module("areal_dta.collector.dispatch")
        areal: Any = super()
        stock = areal.as_controller(config, scheduler)  # with the engine's checks
        if config._version == "v2":
            return stock
        return getattr(dispatch, cls.controller)(cls, config, scheduler)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._samples: deque[tuple[float, ...]] = deque(maxlen=_KEPT_SAMPLES)

    def dispatch_forward(
        self, method: str, items: list[Item], share: str
    ) -> list[Tensor]:
        """``compute_logp`` or ``compute_values``: a piece [n, s] of each item sent.

        Collective; a rank may have been sent none.
        """
        rows = Share.from_text(share).take_all(items)
        result: list[Tensor] = getattr(self, method)(rows)
        return result

    def dispatch_update(self, items: list[Item], share: str) -> None:
        """``ppo_update``, minibatch by minibatch: all ranks have the same number."""
        parsed = Share.from_text(share)
        items = [join_pieces(item) for item in items]
        with self._one_minibatch():
            for minibatch in range(len(parsed.rows)):
                rows = parsed.take(items, minibatch)
                if rows:
                    rows[0] = widen(rows[0], parsed.width)
                self.ppo_update(rows)  # type: ignore[attr-defined]

    def take_block_samples(self) -> list[list[float]]:
        """Blocks measured since the last call, of all ranks in turn, as rows of
        ``BlockSample.to_floats``. Collective."""
        everyone: list[Any] = [None] * dist.get_world_size(self.cpu_group)
        own = list(self._samples)
        self._samples.clear()
        dist.all_gather_object(everyone, own, group=self.cpu_group)
        return [list(row) for rows in everyone for row in rows]

    def advance_lr_scheduler(self, num_steps: int) -> None:
        """To where a run was that ended after so many steps: AReaL does not save it."""
        for _ in range(num_steps):
            self.step_lr_scheduler()

    def train_batch(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        stats: dict[str, float] = super().train_batch(*args, **kwargs)
        self._note_samples()
        return stats

    def forward_batch(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward_batch(*args, **kwargs)
        self._note_samples()
        return result

    def _note_samples(self) -> None:
        executor = getattr(self, "_executor", None)  # dense engines have none
        samples = getattr(executor, "last_samples", None) or ()
        self._samples.extend(sample.to_floats() for sample in samples)

    @contextmanager
    def _one_minibatch(self) -> Iterator[None]:
        """Keep AReaL's algorithm from splitting a minibatch again."""
        algorithm: Any = getattr(self, "actor", None) or getattr(self, "critic", None)
        config = algorithm.config
        algorithm.config = copy.copy(config)
        algorithm.config.ppo_n_minibatches = 1
        try:
            yield
        finally:
            algorithm.config = config


class DispatchedActor(Dispatched):
    """Also advantages, which are computed on whole items."""

    controller = "DTAActorController"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name in ("adv_norm", "reward_norm"):
            if isinstance(getattr(self.actor, name), Normalization):
                norm = ItemNormalization(getattr(config, name))
                setattr(self.actor, name, norm)

    def compute_advantages(self, items: list[Item]) -> list[Item]:
        """AReaL's, each item normalised over its own rows."""
        areal: Any = super()
        with ExitStack() as stack:
            for norm in (self.actor.reward_norm, self.actor.adv_norm):
                if isinstance(norm, ItemNormalization):
                    stack.enter_context(norm.items(items))
            result: list[Item] = areal.compute_advantages(items)
        return result

    def dispatch_advantages(self, items: list[Item], width: int) -> list[Item]:
        """``compute_advantages`` of whole items, without the keys that it leaves as
        they are. Collective; a rank may have been sent none.

        Args:
            width: longest sequence of the whole batch, see `Share`.
        """
        joined = [join_pieces(item) for item in items]
        shapes = [tuple(item["attention_mask"].shape) for item in joined]
        if joined:
            joined[0] = widen(joined[0], width)
        done = self.compute_advantages(joined)
        results = []
        for item, (num_rows, own_width) in zip(done, shapes, strict=True):
            wide = item["attention_mask"].shape[1]
            item = narrow(item, num_rows, wide, own_width)
            results.append({k: v for k, v in item.items() if k not in UNCHANGED})
        return results


class DispatchedCritic(Dispatched):
    controller = "DTACriticController"
