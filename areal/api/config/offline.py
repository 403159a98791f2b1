"""Experiments without generation: SFT, reward models and DPO.

For the latter two `train_dataset.batch_size` counts pairs of a chosen and a rejected answer; pairs
are never split.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.placement import check_models
from areal.api.config.ppo import RefConfig
from areal.api.config.section import config_section, require_above
from areal.api.config.train_engine import TrainEngineConfig


@config_section
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    trainer: Literal["sft"] = "sft"
    """Which trainer `areal train` runs."""
    actor: TrainEngineConfig
    """The trained model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inherit_from_trainer(self.actor, "sft")
        check_models(self)


@config_section
class RWConfig(BaseExperimentConfig):
    """Training of a reward model."""

    trainer: Literal["rw"] = "rw"
    """Which trainer `areal train` runs."""
    actor: TrainEngineConfig
    """The trained model; `is_critic: true` gives it a scoring head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inherit_from_trainer(self.actor, "rw")
        check_models(self)


@config_section
class DPOActorConfig(TrainEngineConfig):
    """The policy trained by direct preference optimisation."""

    beta: float = 0.1
    """How strongly the policy is kept near the reference model."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid` is DPO; `ipo` regresses the margin on 1 / (2 beta)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_above(0, beta=self.beta)


@config_section
class DPOConfig(BaseExperimentConfig):
    """Direct preference optimisation, or IPO."""

    trainer: Literal["dpo"] = "dpo"
    """Which trainer `areal train` runs."""
    actor: DPOActorConfig
    """The trained policy."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference model. Default: the model that training starts from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inherit_from_trainer(self.actor, "dpo")
        self.ref.inherit(self.actor)
        check_models(self)
