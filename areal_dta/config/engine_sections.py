"""AReaL's configurations of training engines with the tree engine's options."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.api.cli_args import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    TrainEngineConfig,
)

from areal_dta.config.engine_options import DTAOptions, fuses_prox_logp


@dataclass
class TreeEngineFields:
    """What we add to each of AReaL's configurations of a training engine."""

    dta: DTAOptions = field(default_factory=DTAOptions)
    engine: str = field(
        default="",
        metadata={"help": "Set by the trainer: the engine that `backend` selected."},
    )


@dataclass
class DTAPPOActorConfig(TreeEngineFields, PPOActorConfig):
    """AReaL's actor configuration with the tree engine's options; also that of the
    reference and of a teacher."""

    def should_compute_prox_logp(self) -> bool:
        """Whether the trainer runs a forward pass for the proximal logprobs."""
        if self.engine == "dta" and fuses_prox_logp(self):
            return False
        return bool(super().should_compute_prox_logp())


@dataclass
class DTAPPOCriticConfig(TreeEngineFields, PPOCriticConfig):
    """AReaL's critic configuration with the tree engine's options."""


@dataclass
class DTATrainEngineConfig(TreeEngineFields, TrainEngineConfig):
    """Of supervised fine-tuning and of reward models."""


@dataclass
class DTADPOEngineConfig(TreeEngineFields, DPOEngineConfig):
    """Of DPO, for the model and for its reference."""


@dataclass
class DTATeacherConfig(TeacherConfig):
    """AReaL's teacher; `train.backend` may also be ``dta:dN``."""

    train: DTAPPOActorConfig | None = None
