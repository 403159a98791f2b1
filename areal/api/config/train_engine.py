"""Sections of a training engine: optimizer, micro-batches, normalisation, precision, layout."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from areal.api.alloc_mode import (
    AllocationMode,
    ModelAllocation,
    ParallelStrategy,
    check_expert_tensor_parallel,
)
from areal.api.config.section import (
    config_section,
    expand_path,
    require,
    require_above,
    require_at_least,
    require_fraction,
)
from areal.api.scheduler_api import SchedulingSpec, SchedulingStrategy


@config_section
class OptimizerConfig:
    """AdamW or SGD. The schedule counts global steps, not minibatches."""

    type: Literal["adam", "sgd"] = "adam"
    """`adam` is AdamW: weight decay is decoupled from the gradient."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    weight_decay: float = 0.01
    """Shrinks every weight matrix by lr * weight_decay a step."""
    beta1: float = 0.9
    """Decay of Adam's running mean of gradients; SGD's momentum."""
    beta2: float = 0.999
    """Decay of Adam's running mean of squared gradients."""
    eps: float = 1e-8
    """Keeps Adam's division finite."""
    min_lr_ratio: float = 0.0
    """The schedule ends at lr * min_lr_ratio."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    warmup_steps_proportion: float = 0.001
    """Share of the training spent raising the learning rate from 0."""
    warmup_steps: int | None = None
    """The same in steps; when set it replaces `warmup_steps_proportion`."""
    gradient_clipping: float = 1.0
    """Largest norm of the whole gradient."""

    def __post_init__(self) -> None:
        require_above(0, lr=self.lr, eps=self.eps, gradient_clipping=self.gradient_clipping)
        require_at_least(0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        require(0 <= self.beta1 < 1, "beta1 must lie in [0, 1)", self.beta1)
        require(0 <= self.beta2 < 1, "beta2 must lie in [0, 1)", self.beta2)
        require_fraction(
            min_lr_ratio=self.min_lr_ratio, warmup_steps_proportion=self.warmup_steps_proportion
        )


@config_section
class MicroBatchSpec:
    """How a batch is split so that activations fit in memory. The result does not depend on it."""

    n_mbs: int = 1
    """At least this many micro-batches."""
    max_tokens_per_mb: int | None = None
    """Token budget of one micro-batch; a longer sequence gets one of its own. None: no budget."""
    packing_algorithm: Literal["ffd", "kk"] = "ffd"
    """`ffd` fills each micro-batch to the budget, `kk` makes them equally long."""

    def __post_init__(self) -> None:
        require_at_least(1, n_mbs=self.n_mbs, max_tokens_per_mb=self.max_tokens_per_mb)


@config_section
class NormConfig:
    """Centre and scale values over the whole batch or over the samples of one prompt. Of rewards
    each episode counts once, whatever rows it exported; of advantages each token."""

    mean_level: Literal["batch", "group"] | None = "batch"
    """Whose mean is subtracted; null subtracts nothing."""
    mean_leave1out: bool = False
    """Leave-one-out: the mean excludes the sample itself, with all rows of its episode."""
    std_level: Literal["batch", "group"] | None = "batch"
    """Whose standard deviation divides; null divides by nothing. If a group's is too small to
    divide by (equal rewards, one sample), the batch's is used, and if that is too small too,
    none."""
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
        """Whether a sample is compared with the others of its prompt."""
        return "group" in (self.mean_level, self.std_level)


@config_section
class FSDPEngineConfig:
    """Options of the fsdp engine alone."""

    offload_params: bool = False
    """Weights, gradients and optimizer stay in host memory; blocks are copied to the GPU for
    use."""
    num_replicas: int = 1
    """Replicas of the weights (a divisor of d), each sharded over its share of the data-parallel
    ranks. More replicas gather weights among fewer ranks, take more memory and all-reduce gradients
    at the end."""

    def __post_init__(self) -> None:
        require_at_least(1, num_replicas=self.num_replicas)


@config_section
class ArchonFP8Config:
    """Training in FP8: the matrix products of linear layers, forward and backward."""

    mode: Literal["disabled", "blockwise"] = "disabled"
    """`blockwise`: rows of activations and gradients have a scale for 128 numbers, weights for
    128 x 128. Hopper multiplies them in FP8; elsewhere there is the same rounding and no gain. The
    LM head, routers, experts and a critic's score head keep the model's dtype."""
    exclude_modules: list[str] = field(default_factory=list)
    """Linear layers that keep the model's dtype: those with one of these in their names, like
    `layers.0.` or `attention.wo`. `output`, `router` and `score` always do and may be named."""

    def __post_init__(self) -> None:
        require(
            all(self.exclude_modules),
            "fp8_config.exclude_modules: an empty name would exclude every layer",
            self.exclude_modules,
        )


@config_section
class ArchonEngineConfig:
    """Options of the archon engine alone."""

    enable_compile: bool = False
    """Compile each block: faster after a first step that takes about a minute."""
    ac_mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """How gradient_checkpointing saves memory: `full` keeps only the inputs of each block and
    computes a third more; `selective` keeps the results of matrix products and attention;
    `memory_budget` (needs enable_compile) keeps as much as `ac_memory_budget` says."""
    selective_ac_option: str = "op"
    """`op`: as above, in every block. A number n: `full` in every n-th block, nothing elsewhere."""
    ac_memory_budget: float = 0.5
    """Share of the memory `selective` keeps, from 0 to 1."""
    pp_schedule: Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = (
        "Interleaved1F1B"
    )
    """In which order the stages of a pipeline (`p2` and more in `backend`) compute micro-batches.
    `1F1B` has one stage on each rank, the others two or more, with less idle time. Zero bubble also
    fills idle time with the gradients of weights: `ZBVZeroBubble` has exactly two stages on each
    rank, one from each end of the model."""
    pp_layers_per_stage: int | None = None
    """Layers of a stage, embedding and head included; more, shorter stages idle less and
    communicate more. Default: as many stages as the schedule needs."""
    pp_first_stage_less_layers: int = 1
    """How many layers' work the embedding counts for; the first stage has so many fewer."""
    pp_last_stage_less_layers: int = 1
    """How many layers' work the final norm and head count for. A large vocabulary on a small model
    is worth several."""
    num_replicas: int = 1
    """Replicas of the weights (a divisor of d), each sharded over its share of the data-parallel
    ranks. More replicas gather weights among fewer ranks, take more memory and all-reduce gradients
    at the end."""
    fp8_forward: bool = False
    """Forward passes round weights, activations, keys and values as a server with native.dtype fp8
    does, so that log-probabilities and gradients are those of what sampled. For dense models. Not
    faster by itself; `fp8_config` may be on too."""
    fp8_config: ArchonFP8Config = field(default_factory=ArchonFP8Config)
    """Training in FP8, for speed; beside servers in FP8, with `fp8_forward`."""

    @property
    def trains_in_fp8(self) -> bool:
        return self.fp8_config.mode != "disabled"

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed after those of hidden states."""
        return "ZeroBubble" in self.pp_schedule

    def __post_init__(self) -> None:
        require_fraction(ac_memory_budget=self.ac_memory_budget)
        require(
            not (self.splits_backward and self.enable_compile),
            f"pp_schedule {self.pp_schedule} computes the backward pass in two parts, which "
            "compiled blocks do not support: set enable_compile to false",
            True,
        )
        option = self.selective_ac_option
        require(
            option == "op" or (option.isdecimal() and int(option) > 0),
            "selective_ac_option must be `op` or a number of blocks from 1",
            option,
        )
        require(
            self.ac_mode != "memory_budget" or self.enable_compile,
            "ac_mode memory_budget is done by the compiler: set enable_compile to true",
            self.ac_mode,
        )
        require_at_least(
            1, pp_layers_per_stage=self.pp_layers_per_stage, num_replicas=self.num_replicas
        )
        require_at_least(
            0,
            pp_first_stage_less_layers=self.pp_first_stage_less_layers,
            pp_last_stage_less_layers=self.pp_last_stage_less_layers,
        )


@config_section
class MegatronEngineConfig:
    """Options of the megatron engine alone."""

    virtual_pipeline_parallel_size: int = 1
    """Stages on each rank of a pipeline (`p2` and more in `backend`): more, shorter ones idle less
    and communicate more. p times this number divides the model's layers, and micro-batches are
    padded to the longest of a step."""

    def __post_init__(self) -> None:
        require_at_least(1, virtual_pipeline_parallel_size=self.virtual_pipeline_parallel_size)


@config_section
class TrainEngineConfig:
    """One model to train, and how."""

    path: str
    """The model to start from: a Hugging Face folder, or a hub name, `org/name` or
    `org/name@revision`."""
    backend: str = "archon:d1"
    """Engine and parallel layout: `archon:d1` trains areal's own models, `fsdp:d1` most causal LMs
    of transformers, `megatron:d1` Qwen and Llama models on megatron-core (extra `megatron`, CUDA).
    `archon:d4t2` runs on 8 ranks, worker processes of the controller."""
    init_from_scratch: bool = False
    """Random weights: only the model's config is read from `path`."""
    is_critic: bool = False
    """One number per token (a value or a score) in place of the LM head's probabilities."""
    temperature: float = 1.0
    """Divides the logits before log-probabilities. For RL it must equal `gconfig.temperature`."""
    logprobs_chunk_size: int = 2048
    """Tokens whose logits exist at the same time; bounds the memory of the LM head."""
    offload: bool = False
    """Keep weights and optimizer in host memory but while this model is used: they leave the device
    when another model of the same processes computes, and when training waits for episodes. Same
    results. Backends archon and fsdp."""
    batch_invariant: bool = False
    """Forward passes with the arithmetic of a batch-invariant native engine: log-probabilities of
    both are then equal bit for bit. On the CPU the engine always is one; on CUDA set
    native.batch_invariant too, for a model without experts. Slower."""
    enable_tree_training: bool = False
    """Compute shared prefixes of a micro-batch once: the prompt of a group, earlier turns of an
    agent. Same loss and gradients but for rounding; max_tokens_per_mb then counts the tokens
    computed. For backends archon and fsdp, without pipeline stages."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How a batch is split into micro-batches."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model. Default: bfloat16 on a GPU, float32 on a CPU."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which ranks sum gradients. bfloat16 sends half the bytes and rounds each sum."""
    optimizer: OptimizerConfig | None = None
    """Required to train."""
    gradient_checkpointing: bool = False
    """Keep only a part of each block's results and recompute the rest in the backward pass: less
    memory, more work. `archon.ac_mode` says which; fsdp and megatron keep the inputs of blocks."""
    freeze_vision_tower: bool = False
    """Train the language model of a vision model and leave its tower, patch merger included, as it
    is."""
    use_lora: bool = False
    """Train LoRA adapters beside the frozen weights. Only these are saved, in peft's format, and
    sent to servers that take them (rollout.use_lora). Backend fsdp needs the extra `lora`."""
    lora_rank: int = 32
    """Rank of the adapters."""
    lora_alpha: float = 16.0
    """The adapters' product is scaled by lora_alpha / lora_rank."""
    target_modules: list[str] = field(default_factory=list)
    """Layers that get adapters, by the ends of their names, like `[q_proj, v_proj]`. Default: every
    linear layer but the head; experts only if they are named."""
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    """Settings of backend fsdp."""
    archon: ArchonEngineConfig = field(default_factory=ArchonEngineConfig)
    """Settings of backend archon."""
    megatron: MegatronEngineConfig = field(default_factory=MegatronEngineConfig)
    """Settings of backend megatron."""
    weight_update_mode: Literal["shm", "ipc", "xccl", "disk", "delta", "direct"] = "shm"
    """How weights reach the inference engine: shared memory, the memory of a GPU both processes
    use (ipc), a broadcast from device to device (xccl), a folder, a folder with only what changed
    (delta), or inside one process (direct)."""
    scheduling_spec: list[SchedulingSpec] = field(default_factory=list)
    """What each rank needs of its machine: one entry for all ranks, or one for each."""
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)
    """Worker processes of its own, or those of another role."""
    setup_timeout: float = 3600.0
    """Timeout of the ranks' start, in seconds."""
    request_timeout: float = 3600.0
    """Timeout of a call to the ranks, in seconds: a training step, a checkpoint."""

    def __post_init__(self) -> None:
        if self.path is not None:  # pyright: ignore[reportUnnecessaryComparison]  # a critic's may be
            require(bool(self.path), "path must name a model folder", self.path)
            self.path = expand_path("path", self.path)
        require_above(0, temperature=self.temperature)
        require_at_least(1, logprobs_chunk_size=self.logprobs_chunk_size)
        require_at_least(1, lora_rank=self.lora_rank)
        require_above(0, lora_alpha=self.lora_alpha)
        require_above(0, setup_timeout=self.setup_timeout, request_timeout=self.request_timeout)
        check_training_backend(self.backend)
        self._check_engine_keys(self.allocation.backend)

    @property
    def allocation(self) -> ModelAllocation:
        """Engine and parallel layout of `backend`."""
        return ModelAllocation.from_str(self.backend)

    @property
    def num_ranks(self) -> int:
        return self.allocation.parallel.world_size

    def _check_engine_keys(self, engine: str) -> None:
        """Reject keys that the chosen engine does not read."""
        self._check_batch_invariant(engine)
        require(
            engine != "megatron" or not self.enable_tree_training,
            "enable_tree_training needs backend archon or fsdp (backend is megatron)",
            self.enable_tree_training,
        )
        require(
            engine != "megatron" or self.grad_reduce_dtype == "float32",
            "grad_reduce_dtype must be float32 with backend megatron",
            self.grad_reduce_dtype,
        )
        require(
            engine == "archon" or self.archon == ArchonEngineConfig(),
            f"the section archon needs backend archon (backend is {self.backend!r})",
            self.archon,
        )
        require(
            engine == "megatron" or self.megatron == MegatronEngineConfig(),
            f"the section megatron needs backend megatron (backend is {self.backend!r})",
            self.megatron,
        )
        require(
            not (self.archon.splits_backward and self.gradient_checkpointing),
            f"archon.pp_schedule {self.archon.pp_schedule} computes the backward pass in two "
            "parts, which gradient_checkpointing does not support: use Interleaved1F1B or 1F1B",
            True,
        )
        self._check_fp8()
        require(
            engine != "megatron" or self.dtype != "float16",
            "backend megatron trains in bfloat16 or float32",
            self.dtype,
        )
        require(
            engine != "megatron" or self.optimizer is None or self.optimizer.type == "adam",
            "backend megatron trains with adam, the only one of its distributed optimizer",
            self.optimizer and self.optimizer.type,
        )
        require(
            engine != "megatron" or not self.use_lora,
            "use_lora needs backend archon or fsdp (backend is megatron)",
            self.use_lora,
        )
        require(
            engine != "megatron" or not self.freeze_vision_tower,
            "freeze_vision_tower needs backend archon or fsdp (megatron trains text models)",
            self.freeze_vision_tower,
        )
        check_offload("offload", self.offload, engine, self.fsdp)
        if engine != "fsdp":
            for name, value in {
                "fsdp.offload_params": self.fsdp.offload_params,
                "fsdp.num_replicas": self.fsdp.num_replicas > 1,
            }.items():
                require(
                    not value, f"{name} needs backend fsdp (backend is {self.backend!r})", value
                )
        self.check_layout(ModelAllocation.from_str(self.backend).parallel)
        require(
            self.use_lora or not self.target_modules,
            "target_modules needs use_lora: true",
            self.target_modules,
        )

    def _check_batch_invariant(self, engine: str) -> None:
        require(
            engine == "archon" or not self.batch_invariant,
            f"batch_invariant needs backend archon (backend is {self.backend!r})",
            self.batch_invariant,
        )
        require(
            not (self.batch_invariant and self.enable_tree_training),
            "enable_tree_training has no batch_invariant attention: turn one of them off",
            True,
        )
        require(
            not (self.batch_invariant and self.archon.enable_compile),
            "batch_invariant has kernels of its own: set archon.enable_compile to false",
            True,
        )
        require(
            not (self.use_lora and self.batch_invariant),
            "use_lora must be false with batch_invariant: servers get the adapters merged, which "
            "rounds differently",
            self.use_lora,
        )

    def _check_fp8(self) -> None:
        archon = self.archon
        for name, value in {
            "use_lora": self.use_lora,
            "batch_invariant": self.batch_invariant,
        }.items():
            require(
                not (value and archon.fp8_forward),
                f"{name} must be false with archon.fp8_forward, whose layers do not support it",
                value,
            )
        trains_all = archon.trains_in_fp8 and not archon.fp8_config.exclude_modules
        require(
            trains_all or not (archon.enable_compile and archon.fp8_forward),
            "archon.enable_compile must be false with archon.fp8_forward, unless all layers train "
            "in FP8 (archon.fp8_config): layers that only round do not support it",
            archon.enable_compile,
        )
        for name, value in {
            "use_lora": self.use_lora,
            "batch_invariant": self.batch_invariant,
        }.items():
            require(
                not (value and archon.trains_in_fp8),
                f"{name} must be false with archon.fp8_config.mode {archon.fp8_config.mode}, whose "
                "layers do not support it",
                value,
            )
        require(
            not archon.trains_in_fp8 or self.dtype != "float16",
            f"dtype must be bfloat16 or float32 with archon.fp8_config.mode "
            f"{archon.fp8_config.mode}: float16 does not hold what FP8 with a scale holds",
            self.dtype,
        )

    def check_layout(self, layout: ParallelStrategy) -> None:
        """Check that the ranks of `layout` support these keys; engines check again with their own
        layout."""
        for section, num_replicas in {
            "archon": self.archon.num_replicas,
            "fsdp": self.fsdp.num_replicas,
        }.items():
            require(
                layout.data_parallel_size % num_replicas == 0,
                f"{section}.num_replicas must divide the d{layout.data_parallel_size} of backend "
                f"{self.backend!r}",
                num_replicas,
            )
        num_stages = self.megatron.virtual_pipeline_parallel_size
        require(
            num_stages == 1 or layout.pipeline_parallel_size > 1,
            "megatron.virtual_pipeline_parallel_size above 1 needs a pipeline: add p2 or more to "
            f"backend {self.backend!r}, or remove it",
            num_stages,
        )
        if layout.world_size == 1:
            return
        own = ModelAllocation.from_str(self.backend)
        written = self.backend if own.parallel == layout else f"{own.backend}:{layout}"
        several = f"(backend {written!r} has {layout.world_size} ranks)"
        require(not self.batch_invariant, f"batch_invariant needs one rank {several}", True)
        require(
            self.weight_update_mode in ("shm", "disk", "delta", "xccl"),
            f"weight_update_mode must be shm, disk, delta or xccl {several}",
            self.weight_update_mode,
        )
        sharded = layout.tensor_parallel_size * layout.pipeline_parallel_size
        require(
            not self.archon.fp8_forward or sharded == 1,
            f"archon.fp8_forward must be false with t or p: use d or c instead {several}",
            True,
        )
        require(
            not self.archon.trains_in_fp8 or sharded == 1,
            f"archon.fp8_config.mode must be disabled with t or p: use d, c or e instead {several}",
            self.archon.fp8_config.mode,
        )
        require(
            not self.use_lora or own.backend == "archon" or layout.tensor_parallel_size == 1,
            f"use_lora cannot be sharded by t with backend {own.backend}: use d or c instead, or "
            f"backend archon {several}",
            True,
        )
        require(
            not self.enable_tree_training or layout.pipeline_parallel_size == 1,
            f"enable_tree_training cannot be cut into pipeline stages: use d, t or c instead of p "
            f"{several}",
            True,
        )


def check_offload(key: str, offload: bool, engine: str, fsdp: FSDPEngineConfig) -> None:
    """`offload` is the value of `key`."""
    require(
        not offload or engine != "megatron",
        f"{key} must be false with backend megatron, whose buffers cannot leave the device",
        offload,
    )
    require(
        not (offload and engine == "fsdp" and fsdp.offload_params),
        f"{key} must be false with fsdp.offload_params, which keeps them in host memory always",
        offload,
    )


_TRAINING_ENGINES = ("archon", "fsdp", "megatron")


def check_training_backend(backend: str) -> None:
    """`backend` parses, is for training, and its engine supports the layout."""
    allocation = _parse_backend(backend, "training", "archon:d1")
    if allocation.backend not in _TRAINING_ENGINES:
        known = " or ".join(f"'{engine}:d1'" for engine in _TRAINING_ENGINES)
        raise ValueError(f"backend {backend!r} cannot run in this version: use {known}")
    if allocation.backend == "megatron":
        return  # megatron-core accepts every letter
    try:
        check_expert_tensor_parallel(allocation.parallel)
    except ValueError as error:
        raise ValueError(f"backend: {error}") from None


def check_inference_backend(backend: str) -> None:
    """`backend` parses and is for inference. Only stock servers have pipeline stages."""
    allocation = _parse_backend(backend, "inference", "native:d1")
    if allocation.backend == "native" and allocation.parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"backend {backend!r} cannot run in this version: use d for servers and t for the "
            "devices a model is sharded over, like 'native:d1t2'; vllm and sglang also take p"
        )


def _parse_backend(backend: str, role: str, example: str) -> ModelAllocation:
    try:
        allocation = ModelAllocation.from_str(backend)
    except ValueError as error:
        raise ValueError(f"backend: {error}") from None
    if allocation.role != role:
        raise ValueError(
            f"backend {backend!r} is for {allocation.role}, this section needs one for {role}, "
            f"like {example!r}"
        )
    return allocation


def check_allocation(allocation_mode: str, role: str, backend: str) -> None:
    """Check that the string, if there is one, holds the `backend` of `role`."""
    if not allocation_mode:
        return
    try:
        mode = AllocationMode.from_str(allocation_mode)
    except ValueError as error:
        raise ValueError(f"allocation_mode: {error}") from None
    layouts = {(part.backend, part.parallel) for part in mode.allocations}
    engine = ModelAllocation.from_str(backend)
    require(
        (engine.backend, engine.parallel) in layouts,
        f"allocation_mode must hold {backend!r}, the backend of {role}; leave it out and write "
        "`backend` in each section",
        allocation_mode,
    )
