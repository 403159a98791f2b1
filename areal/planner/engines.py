"""The engines of a config as the planner sees them: memory and speed of each.

trainer_of(section, hf_config, device)   a `Trainer`: one model that is trained or asked
servers_of(config, hf_config, device)    the `Servers` that generate
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.experiment import PPOConfig
from areal.api.config.inference_servers import NativeServerConfig, SGLangConfig, vLLMConfig
from areal.api.config.train_engine import TrainEngineConfig
from areal.models import decoder_args
from areal.planner.devices import GIB, Device
from areal.planner.memory import Memory, ServerRank, TrainingRank
from areal.planner.shapes import Shape, UnplannableError
from areal.planner.speed import Generation, Layout, Training
from areal.planner.workload import Workload

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_LENGTHS = 64  # quantiles that stand for the sequences of a micro-batch
_LORA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SGLANG_RUNNING = 256  # assumed; by default the server decides
_DISK_BYTES_PER_S = 1e9  # of a disk that machines share: assumed
_DELTA_SHARE = 1 / 45  # of the weights' bytes: benchmark/results/weight_sync.json


def itemsize(dtype: str | None, device: Device) -> int:
    """Of a model; by default bfloat16 on a GPU, float32 on a CPU."""
    return _ITEMSIZE[dtype or ("bfloat16" if device.kind == "cuda" else "float32")]


def shape_of(hf_config: Mapping[str, Any], *, is_critic: bool = False) -> Shape:
    """UnplannableError for a model that is not one of areal's own."""
    try:
        return Shape(decoder_args(hf_config, is_critic=is_critic))
    except ValueError as error:
        raise UnplannableError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Trainer:
    """One model on its ranks."""

    training: Training
    rank: TrainingRank  # without the batch, which `memory` adds
    max_tokens: int | None  # of a micro-batch
    min_micro_batches: int
    minibatches: int = 1  # optimizer steps of a batch

    @property
    def layout(self) -> Layout:
        return self.training.layout

    def _rank_tokens(self, load: Workload) -> float:
        """Of an optimizer step, on a data-parallel rank."""
        return load.tokens / self.layout.dp / self.minibatches

    def num_micro_batches(self, load: Workload) -> int:
        budget = self.max_tokens or math.inf
        count = math.ceil(self._rank_tokens(load) / budget)
        return max(count, self.min_micro_batches, self.layout.pp)

    def largest_micro_batch(self, load: Workload) -> float:
        """Tokens; a sequence that is longer than the budget gets one of its own."""
        longest = load.prompt + load.max_output
        even = self._rank_tokens(load) / self.min_micro_batches
        return max(longest, min(self.max_tokens or math.inf, even))

    def memory(self, load: Workload, process: str) -> Memory:
        tokens = self.largest_micro_batch(load)
        rows = tokens / (load.prompt + load.output)
        rank = replace(
            self.rank,
            tokens=tokens,
            image_tokens=load.distinct_prompts(max(rows, 1)) * load.image,
            longest=load.prompt + load.max_output,
            num_micro_batches=self.num_micro_batches(load),
        )
        return rank.memory(process)

    def train_s(self, load: Workload) -> float:
        """All optimizer steps of a batch."""
        step = self._pass_s(load, trains=True) + self.training.optimizer_s()
        return self.minibatches * step

    def forward_s(self, load: Workload) -> float:
        return self.minibatches * self._pass_s(load, trains=False)

    def _pass_s(self, load: Workload, *, trains: bool) -> float:
        count = self.num_micro_batches(load)
        rows = max(load.num_samples / self.layout.dp / self.minibatches / count, 1e-9)
        lengths = load.outputs(max(1, min(round(rows), _MAX_LENGTHS)))
        one = self.training.micro_batch_s(
            [load.prompt + length for length in lengths], copies=rows / len(lengths), trains=trains
        )
        images = load.distinct_prompts(rows)
        one += self.training.look_s(images, load.image, trains=trains)
        return count * one * self.training.bubble(count)


def trainer_of(section: TrainEngineConfig, hf_config: Mapping[str, Any], device: Device) -> Trainer:
    """`section` of a frozen model has no optimizer."""
    allocation = section.allocation
    shape = shape_of(hf_config, is_critic=section.is_critic)
    layout = layout_of(section)
    mode, full_share, compiled = _checkpointing(section)
    item = itemsize(section.dtype, device)
    optimizer = section.optimizer
    training = Training(
        shape=shape,
        device=device,
        layout=layout,
        recompute=mode if mode in ("full", "selective") else "none",
        compiled=compiled,
        itemsize=item,
        has_adapters=section.use_lora,
    )
    rank = TrainingRank(
        shape=shape,
        device=device,
        engine=allocation.backend,
        layout=layout,
        tokens=1,
        mode=mode,
        full_share=full_share,
        extra_kept=_extra_kept(section, shape),
        is_compiled=compiled,
        itemsize=item,
        logits_chunk=section.logprobs_chunk_size,
        trains=optimizer is not None,
        num_moments=1 if optimizer is not None and optimizer.type == "sgd" else 2,
        trained_weights=lora_weights(section, shape) if section.use_lora else None,
        is_offloaded=section.fsdp.offload_params,
        sends_buckets=section.weight_update_mode == "xccl" and optimizer is not None,
    )
    return Trainer(
        training,
        rank,
        section.mb_spec.max_tokens_per_mb,
        section.mb_spec.n_mbs,
        getattr(section, "ppo_n_minibatches", 1),
    )


def layout_of(section: TrainEngineConfig) -> Layout:
    parallel, archon = section.allocation.parallel, section.archon
    engine = section.allocation.backend
    stages = 1 if archon.pp_schedule == "1F1B" else 2
    if engine == "megatron":
        stages = section.megatron.virtual_pipeline_parallel_size
    return Layout(
        dp=parallel.data_parallel_size,
        tp=parallel.tensor_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_parallel_size,
        ep=parallel.expert_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        replicas=archon.num_replicas if engine == "archon" else section.fsdp.num_replicas,
        stages_per_rank=stages,
    )


def _checkpointing(section: TrainEngineConfig) -> tuple[str, float, bool]:
    """What is kept, the share of blocks that keep only their input, and whether blocks are
    compiled, which keeps what `selective` means anyway."""
    archon = section.archon
    compiled = archon.enable_compile and section.allocation.backend == "archon"
    plain = "compiled" if compiled else "none"
    if not section.gradient_checkpointing:
        return plain, 0.0, compiled
    if section.allocation.backend != "archon" or archon.ac_mode == "full":
        return "full", 0.0, compiled
    if archon.ac_mode == "memory_budget":
        return plain, 1.0 - archon.ac_memory_budget, compiled
    if archon.ac_mode == "none":
        return plain, 0.0, compiled
    if archon.selective_ac_option != "op":
        return plain, 1 / int(archon.selective_ac_option), compiled
    return ("compiled" if compiled else "selective"), 0.0, compiled


def _extra_kept(section: TrainEngineConfig, shape: Shape) -> float:
    """Numbers per token beyond those of our own blocks: transformers computes norms in float32 and
    rotates out of place; fp8_forward keeps the rounded inputs of every product in the model's
    dtype, unless it trains in FP8."""
    dim, heads = shape.args.dim, shape.query_width + shape.kv_width
    if section.allocation.backend == "fsdp":
        return shape.num_layers * (6 * dim + 2 * heads)
    if section.archon.fp8_forward and not section.archon.trains_in_fp8:
        return shape.num_layers * (2 * dim + shape.query_width + shape.mean_feed_forward)
    return 0.0


def lora_weights(section: TrainEngineConfig, shape: Shape) -> float:
    """Numbers of the adapters: rank x (inputs + outputs) of each adapted layer."""
    args, targets = shape.args, section.target_modules
    q, k, dim = shape.query_width, shape.kv_width, shape.args.dim
    sizes = {"q_proj": dim + q, "k_proj": dim + k, "v_proj": dim + k, "o_proj": q + dim}
    total = 0
    for layer in range(shape.num_layers):
        is_sparse = args.is_sparse(layer)
        width = args.expert_args.hidden_dim if is_sparse else args.hidden_dim
        copies = args.expert_args.num_experts if is_sparse else 1
        for name in _LORA_LINEARS:
            of_expert = is_sparse and name not in sizes
            if name not in targets if targets else of_expert:
                continue
            total += sizes[name] if name in sizes else copies * (dim + width)
    return section.lora_rank * total


@dataclass(frozen=True, slots=True)
class Servers:
    """All inference servers of a run, which are alike."""

    generation: Generation
    rank: ServerRank
    count: int
    recomputes_cache: bool
    static_share: float | None = None  # stock servers: what each takes of its device

    @property
    def num_devices(self) -> int:
        return self.count * self.generation.tp

    def running(self, load: Workload) -> float:
        """Sequences that one server decodes together, at most."""
        held = load.prompt / load.samples + load.output / 2 + self.rank.page_size
        fits = self.rank.cache_tokens / held
        wanted = load.in_flight * load.samples / self.count
        return max(1.0, min(wanted, self.rank.max_running, fits))

    def steady_s(self, load: Workload) -> float:
        """Of a batch, while later ones are generated beside it."""
        rows = self.running(load)
        prompts = max(rows / load.samples, 1)
        step = self.generation.step_of_s(rows, load.prompt, load.output / 2, prompts)
        sample = load.output * step / rows
        sample += self.prompt_s(load) / load.samples
        return load.num_samples / self.count * sample + self.recompute_s(load)

    def prompt_s(self, load: Workload) -> float:
        """Of one prompt, with its images."""
        prefill = self.generation.prefill_s(load.prompt, load.prompt)
        return prefill + self.generation.look_s(load.image)

    def recompute_s(self, load: Workload) -> float:
        """Of the cache of running requests, after an update."""
        if not self.recomputes_cache or load.staleness == 0:
            return 0.0
        length = load.prompt + load.output / 2
        return self.generation.prefill_s(self.running(load) * length, length)

    def whole_s(self, load: Workload) -> float:
        """Of a batch for itself: all start together, and the longest ends it."""
        rows = load.num_samples / self.count
        at_once = min(rows, self.running(load))
        count = max(1, min(round(at_once), 4 * _MAX_LENGTHS))
        seconds = self.generation.batch_s(
            load.outputs(count), load.prompt, at_once / load.samples, copies=at_once / count
        )
        seconds += at_once / load.samples * self.generation.look_s(load.image)
        return seconds * rows / at_once

    def latency_s(self, load: Workload, output: float) -> float:
        """Of one sample among all that run."""
        rows = self.running(load)
        step = self.generation.step_of_s(
            rows, load.prompt, load.output / 2, max(rows / load.samples, 1)
        )
        return output * step + self.prompt_s(load)

    def score_s(self, load: Workload) -> float:
        """Log-probabilities of a batch, of which each server computes a share of the rows."""
        rows = max(load.num_samples / self.count, 1.0)
        tokens, length = rows * (load.prompt + load.output), load.prompt + load.output
        generation, device = self.generation, self.rank.device
        head = 2 * tokens * generation.shape.head_weights / device.flops / generation.tp
        return generation.prefill_s(tokens, length) + head

    def stall_s(self) -> float:
        """Generation stands still while new weights are loaded."""
        device = self.rank.device
        return device.update_ms * 1e-3 + self.rank.weight_bytes / device.bandwidth

    def memory(self, process: str) -> Memory:
        if self.static_share is None:
            return self.rank.memory(process)
        taken = self.static_share * self.rank.device.memory_gib * GIB
        weights = self.rank.weight_bytes
        return Memory(process, {"serve": {"weights": weights, "cache": taken - weights}})


def servers_of(config: PPOConfig, hf_config: Mapping[str, Any], device: Device) -> Servers:
    shape = shape_of(hf_config)
    section, rollout = config.server, config.rollout
    parallel = ModelAllocation.from_str(rollout.backend).parallel
    tp = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    dtype = section.dtype or config.actor.dtype
    is_fp8 = dtype == "fp8"
    item = itemsize(None if is_fp8 else dtype, device)
    is_native = isinstance(section, NativeServerConfig)
    rank = ServerRank(
        shape=shape,
        device=device,
        tp=tp,
        itemsize=item,
        is_fp8=is_fp8,
        page_size=section.page_size if is_native else 16,
        num_pages=section.num_pages if is_native else None,
        max_running=_max_running(section),
        stages_weights=config.actor.weight_update_mode == "xccl" and device.kind == "cuda",
    )
    static_share = None
    if not is_native and device.kind == "cuda":
        is_sglang = isinstance(section, SGLangConfig)
        share = section.mem_fraction_static if is_sglang else section.gpu_memory_utilization
        static_share = share
    generation = Generation(shape=shape, device=device, tp=tp, itemsize=item, is_fp8=is_fp8)
    recomputes = rollout.recompute_kv and is_native
    return Servers(generation, rank, rollout.num_servers, recomputes, static_share)


def _max_running(section: NativeServerConfig | vLLMConfig | SGLangConfig) -> int:
    if isinstance(section, NativeServerConfig):
        return section.max_running
    if isinstance(section, vLLMConfig):
        return section.max_num_seqs
    return section.max_running_requests or _SGLANG_RUNNING


def publish_s(mode: str, shape: Shape, item: int, device: Device, num_devices: int) -> float:
    """Of new weights, from the trainer to all servers."""
    num_bytes = shape.num_weights * item
    if mode in ("direct", "ipc"):
        return num_bytes / device.bandwidth
    if mode == "xccl":
        return num_bytes / device.link(num_devices)
    if mode == "shm":
        return 2 * num_bytes / (device.host_gbs * 1e9)  # out of one device and into another
    written = num_bytes * (_DELTA_SHARE if mode == "delta" else 1)
    return 2 * written / _DISK_BYTES_PER_S
