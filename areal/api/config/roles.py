"""The models beside the actor: `ref`, `teacher` and `critic`.

What they leave out is the actor's: `ref: {}` is the model that training starts from.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import field, replace
from typing import Literal

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.checks import expand_path, require, require_above, require_at_least
from areal.api.config.section import config_section
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    FSDPEngineConfig,
    MegatronEngineConfig,
    MicroBatchSpec,
    TrainEngineConfig,
    check_training_backend,
)
from areal.api.scheduler_api import SchedulingSpec, SchedulingStrategy


@config_section
class FrozenModelConfig:
    """A model that is asked for log-probabilities and never trained."""

    path: str | None = None
    """Hugging Face folder or hub name. Default: actor.path."""
    backend: str | None = None
    """Engine and parallel layout. Default: actor.backend."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model. Default: actor.dtype."""
    mb_spec: MicroBatchSpec | None = None
    """How a batch is cut into micro-batches. Default: actor.mb_spec."""
    scheduling_spec: list[SchedulingSpec] = field(default_factory=list)
    """What each rank needs of its machine: one entry for all ranks, or one for each."""
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)
    """Worker processes of its own, or those of another role:
    `{type: colocation, target: actor}`."""

    def __post_init__(self) -> None:
        if self.path is not None:
            require(bool(self.path), "path must name a model folder", self.path)
            self.path = expand_path("path", self.path)
        if self.backend is not None:
            check_training_backend(self.backend)

    def inherit(self, actor: TrainEngineConfig) -> None:
        """Fill what was left out."""
        self.path = self.path or actor.path
        self.backend = self.backend or actor.backend
        self.dtype = self.dtype or actor.dtype
        self.mb_spec = self.mb_spec or deepcopy(actor.mb_spec)

    @property
    def allocation(self) -> ModelAllocation:
        """Engine and parallel layout that `backend` names."""
        if self.backend is None:
            raise RuntimeError("backend is not known yet: `inherit` takes it from the actor")
        return ModelAllocation.from_str(self.backend)

    def engine_config(self, actor: TrainEngineConfig) -> TrainEngineConfig:
        """An engine without optimizer whose log-probabilities are comparable to the actor's."""
        backend = self.backend or actor.backend
        engine = ModelAllocation.from_str(backend).backend
        # Numbers of replicas and stages are parts of the actor's layout; this one may have another.
        same_layout = backend == actor.backend
        replicas = {} if same_layout else {"num_replicas": 1}
        fsdp, archon = replace(actor.fsdp, **replicas), replace(actor.archon, **replicas)
        return TrainEngineConfig(
            path=self.path or actor.path,
            backend=backend,
            dtype=self.dtype,
            mb_spec=self.mb_spec or actor.mb_spec,
            temperature=actor.temperature,
            logprobs_chunk_size=actor.logprobs_chunk_size,
            fsdp=fsdp if engine == "fsdp" else FSDPEngineConfig(),
            archon=archon if engine == "archon" else ArchonEngineConfig(),
            megatron=actor.megatron if same_layout else MegatronEngineConfig(),
            enable_tree_training=actor.enable_tree_training and engine == "archon",
            scheduling_spec=self.scheduling_spec,
            scheduling_strategy=self.scheduling_strategy,
            setup_timeout=actor.setup_timeout,
            request_timeout=actor.request_timeout,
        )


@config_section
class RefConfig(FrozenModelConfig):
    """The reference model a policy is kept near."""


@config_section
class TeacherConfig(FrozenModelConfig):
    """A model whose log-probabilities of the sampled tokens the policy learns."""

    rl_loss_weight: float = 1.0
    """Weight of the policy's own loss; 0 learns from the teacher alone."""
    distill_loss_weight: float = 0.005
    """Weight of the distance from the teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.path is not None, "path must be set: the model to learn from", None)
        require_at_least(0, rl_loss_weight=self.rl_loss_weight)
        require(
            self.distill_loss_weight != 0,
            "distill_loss_weight must be above 0, or the teacher has no effect: remove the section "
            f"to train without one (rl_loss_weight is {self.rl_loss_weight})",
            self.distill_loss_weight,
        )
        require_above(0, distill_loss_weight=self.distill_loss_weight)


@config_section
class PPOCriticConfig(TrainEngineConfig):
    """The value model of PPO. Optimizer and precision it leaves out are the actor's."""

    path: str | None = None
    """Hugging Face folder or hub name of the model to start from. Default: actor.path."""
    is_critic: bool = True
    """A value head in place of the LM head; always true here."""
    ppo_n_minibatches: int = 4
    """Optimizer steps per batch."""
    eps_clip: float = 0.5
    """A value moves at most this far from its old one before its loss is clipped."""
    value_error: Literal["squared", "huber"] = "squared"
    """What a wrong value costs: half its square, or beyond an error of 10 in proportion to it."""
    mb_spec: MicroBatchSpec | None = None
    """How a batch is cut into micro-batches. Default: actor.mb_spec."""
    mask_no_eos_with_zero: bool = False
    """Leave answers cut off by length out of the value loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.is_critic, "is_critic must be true: a critic gives values", self.is_critic)
        require_at_least(1, ppo_n_minibatches=self.ppo_n_minibatches)
        require_above(0, eps_clip=self.eps_clip)

    def inherit(self, actor: TrainEngineConfig) -> None:
        """Fill what was left out."""
        self.path = self.path or actor.path  # pyright: ignore[reportIncompatibleVariableOverride]  # None until here
        self.optimizer = self.optimizer or deepcopy(actor.optimizer)
        self.dtype = self.dtype or actor.dtype
        self.mb_spec = self.mb_spec or deepcopy(actor.mb_spec)  # pyright: ignore[reportIncompatibleVariableOverride]  # None until here
