"""What the engine of every algorithm shares: its controller, and ranks without rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal.api.cli_args import TrainEngineConfig
from areal.utils.data import tensor_container_to
from torch import Tensor

from areal_dta.engine.batch import BatchInput
from areal_dta.engine.dta_engine import DTAEngine, LossFn, LossWeightFn
from areal_dta.engine.dummy import gather_template, zero_rows
from areal_dta.engine.model_checks import check_actor_config
from areal_dta.engine.statistics import LossStatistics

if TYPE_CHECKING:
    from areal.api import Scheduler

Trajectories = list[dict[str, Any]]


class AlgorithmEngine(DTAEngine):
    """Stands before one of AReaL's algorithm classes among the bases of an engine.

    Raises:
        ValueError: ``is_critic`` is not what the algorithm needs.
    """

    needs_values = False
    """Whether the algorithm trains values instead of a language model."""

    def __init__(self, config: TrainEngineConfig) -> None:
        self._check_kind(config)
        self._is_dummy = False
        super().__init__(config)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Scheduler | None) -> Any:
        """AReaL's (v1) controller, whose workers run this engine.

        Raises:
            ValueError: the configuration asks for what the tree engine cannot do.
        """
        cls._check_kind(config)
        check_actor_config(config)
        areal_class: Any = super()
        return areal_class.as_controller(config, scheduler)

    def train_batch(
        self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        rows = [] if self._is_dummy else input_
        return super().train_batch(rows, loss_fn, loss_weight_fn)

    def eval_batch(
        self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> Tensor:
        rows = [] if self._is_dummy else input_
        return super().eval_batch(rows, loss_fn, loss_weight_fn)

    def _with_some_rows(
        self, call: Callable[[Trajectories], Any], data: Trajectories, num_rows: int = 1
    ) -> None:
        """Make one of AReaL's updates or evaluations; collective.

        These log and split their rows, so a rank without any gives them ``num_rows``
        that look like its peers' and do not count.
        """
        template = gather_template(data[0] if data else {}, self.cpu_group)
        if data or template is None:
            call(data)
            return
        self._is_dummy = True
        try:
            with LossStatistics().silent_call():
                rows = zero_rows(template, num_rows)
                call([tensor_container_to(rows, self.device)])
        finally:
            self._is_dummy = False

    @classmethod
    def _check_kind(cls, config: Any) -> None:
        if bool(config.is_critic) is not cls.needs_values:
            wanted = str(cls.needs_values).lower()
            raise ValueError(
                f"is_critic={str(config.is_critic).lower()}: {cls.__name__} trains "
                f"{'values' if cls.needs_values else 'a language model'}; "
                f"set is_critic={wanted}"
            )
