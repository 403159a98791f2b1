"""What every training engine is told: model, precision, micro-batches, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from areal.api.alloc_mode import AllocationMode, ModelAllocation
from areal.api.config.checks import expand_path, require, require_above, require_at_least
from areal.api.config.optimizer import OptimizerConfig


@dataclass(kw_only=True)
class MicroBatchSpec:
    """How a batch is cut so that activations fit in memory. The result does not depend on it."""

    n_mbs: int = 1
    """At least this many micro-batches."""
    max_tokens_per_mb: int | None = None
    """Token budget of one micro-batch; a longer sequence gets one of its own. None: no budget."""
    packing_algorithm: Literal["ffd", "kk"] = "ffd"
    """`ffd` fills each micro-batch to the budget, `kk` makes them equally long."""

    def __post_init__(self) -> None:
        require_at_least(1, n_mbs=self.n_mbs, max_tokens_per_mb=self.max_tokens_per_mb)


@dataclass(kw_only=True)
class NormConfig:
    """Centre and scale values over the whole batch or over the samples of one prompt."""

    mean_level: Literal["batch", "group"] | None = "batch"
    """Whose mean is subtracted; null subtracts nothing."""
    mean_leave1out: bool = False
    """The mean a sample is compared with leaves that sample out."""
    std_level: Literal["batch", "group"] | None = "batch"
    """Whose standard deviation divides; null divides by nothing."""
    std_unbiased: bool = True
    """Divide squares by n - 1 instead of n."""
    eps: float = 1e-5
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        require_at_least(0, eps=self.eps)
        require(
            self.mean_level is not None or self.std_level is not None,
            "mean_level and std_level are both null, which changes nothing: remove the section",
            None,
        )
        require(
            self.mean_level is not None or not self.mean_leave1out,
            "mean_leave1out needs a mean: set mean_level",
            self.mean_leave1out,
        )

    @property
    def compares_group(self) -> bool:
        """Whether a sample is measured against the others of its prompt."""
        return "group" in (self.mean_level, self.std_level)


@dataclass(kw_only=True)
class TrainEngineConfig:
    """One model to train, and how."""

    path: str
    """Hugging Face folder or hub name of the model to start from."""
    backend: str = "archon:d1"
    """Engine and parallel layout, like `archon:d1`."""
    init_from_scratch: bool = False
    """Random weights: only the model's config is read from `path`."""
    is_critic: bool = False
    """One number per token (a value or a score) in place of the LM head's probabilities."""
    temperature: float = 1.0
    """Divides the logits before log-probabilities. For RL it must equal `gconfig.temperature`."""
    logprobs_chunk_size: int = 1024
    """Tokens whose logits exist at the same time; bounds the memory of the LM head."""
    batch_invariant: bool = False
    """Forward passes with the kernels of native.batch_invariant: log-probabilities of both are then
    equal bit for bit. Needs a CUDA device; slower."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How a batch is cut into micro-batches."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model. Default: bfloat16 on a GPU, float32 on a CPU."""
    optimizer: OptimizerConfig | None = None
    """Required to train."""
    weight_update_mode: Literal["shm", "ipc", "disk", "direct"] = "shm"
    """How weights reach the inference engine: shared memory, the memory of a GPU both processes
    use (ipc), a folder, or inside one process (direct)."""

    def __post_init__(self) -> None:
        if self.path is not None:  # a critic takes the actor's
            require(bool(self.path), "path must name a model folder", self.path)
            self.path = expand_path("path", self.path)
        require_above(0, temperature=self.temperature)
        require_at_least(1, logprobs_chunk_size=self.logprobs_chunk_size)
        check_training_backend(self.backend)


def check_training_backend(backend: str) -> None:
    check_backend(backend, role="training", runnable="archon:d1")


def check_backend(backend: str, *, role: str, runnable: str) -> None:
    """`backend` parses, is of the right kind, and is one this version can run."""
    try:
        allocation = ModelAllocation.from_str(backend)
    except ValueError as error:
        raise ValueError(f"backend: {error}") from None
    if allocation.role != role:
        raise ValueError(
            f"backend {backend!r} is for {allocation.role}, this section needs one for {role}, "
            f"like {runnable!r}"
        )
    layout = allocation.parallel
    if role == "inference":
        layout = replace(layout, tensor_parallel_size=1)  # any number of them can run
    engine = runnable.partition(":")[0]
    if allocation.backend != engine or layout.world_size != 1:
        raise ValueError(f"backend {backend!r} cannot run in this version: use {runnable!r}")


def check_allocation(allocation_mode: str, backends: dict[str, str]) -> None:
    """The one string says the same as the `backend` of each engine, or it is refused."""
    try:
        mode = AllocationMode.from_str(allocation_mode)
    except ValueError as error:
        raise ValueError(f"allocation_mode: {error}") from None
    layouts = {(part.backend, part.parallel) for part in mode.allocations}
    for role, backend in backends.items():
        engine = ModelAllocation.from_str(backend)
        require(
            (engine.backend, engine.parallel) in layouts,
            f"allocation_mode must hold {backend!r}, the backend of {role}; leave it out and "
            "write `backend` in each section",
            allocation_mode,
        )
