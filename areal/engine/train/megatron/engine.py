"""MegatronEngine: models of the Qwen and Llama families on megatron-core.

    engine = MegatronEngine(config)
    engine.create_process_group(parallel_strategy)     # only for several ranks, each in a process
    engine.initialize(ft_spec)
    engine.train_batch(batch, loss_fn, loss_weight_fn); engine.step_lr_scheduler()

Tensor (with sequence), pipeline, virtual pipeline, context and expert parallelism and the
distributed optimizer are megatron-core's; norm, rotation, attention and log-probabilities are
areal's own, so that sequences stay packed and TransformerEngine is not needed. It computes on CUDA
devices only: on a CPU the model can be built, filled and read, no more.

All ranks make every call. Ranks with the same data-parallel index (tensor, context and pipeline
ranks) pass the same rows; results are equal on all of them. With `config.is_critic` the last stage
has a score head, and values replace log-probabilities; a critic that starts from a language model
has value 0 everywhere at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec
from areal.engine.train.base import BaseTrainEngine
from areal.engine.train.export import Weights
from areal.engine.train.fit import check_megatron
from areal.engine.train.megatron.layout import Layout, enter_layout, run_micro_batches
from areal.engine.train.megatron.model import MegatronStage, build_stages
from areal.engine.train.megatron.optimizer import ShardedOptimizer
from areal.engine.train.megatron.weights import (
    drawn_weights,
    fill,
    folder_weights,
    mark_parts,
    part_names,
    stream,
)
from areal.engine.train.micro_batches import MicroBatch, OutputFn
from areal.models import decoder_args, own_config
from areal.models.hf_io import read_hf_config
from areal.models.parallel_dims import ParallelDims


class MegatronEngine(BaseTrainEngine[list[MegatronStage], ShardedOptimizer]):
    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        super().__init__(config, seed=seed)
        self._layout: Layout | None = None

    def _dims_of(self, strategy: ParallelStrategy) -> ParallelDims:
        return ParallelDims(
            pp=strategy.pipeline_parallel_size,
            dp_shard=strategy.data_parallel_size,
            cp=strategy.context_parallel_size,
            tp=strategy.tensor_parallel_size,
        )

    def _create_groups(self, strategy: ParallelStrategy) -> None:
        self._layout = enter_layout(strategy, self.device)
        self.dp_group = self._layout.dp if self._layout.dp.size() > 1 else None

    def is_data_parallel_head(self) -> bool:
        return self.layout.is_head

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise RuntimeError("the engine has no layout yet: call initialize() first")
        return self._layout

    @property
    def stages(self) -> list[MegatronStage]:
        """This rank's stages: one, or several with a virtual pipeline."""
        return self.model

    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        if self.config.optimizer is not None and ft_spec is not None:
            self._require_cuda()
        if self._layout is None:
            self.create_process_group(ParallelStrategy())
        super().initialize(ft_spec)

    def _build_model(self, *, trains: bool) -> list[MegatronStage]:
        config = self.config
        self._hf_config = own_config(read_hf_config(self._folder))
        args = decoder_args(self._hf_config, is_critic=config.is_critic)
        check_megatron(config, args, self.layout.strategy)
        stages = build_stages(args, self.layout, config, dtype=self._dtype(), device=self.device)
        mark_parts(stages)
        if config.init_from_scratch:
            fill(stages, drawn_weights(self._hf_config, self._seed, config.is_critic))
        else:
            self._fill_from(stages, self._folder, new_critic=config.is_critic)
        return stages

    def _fill_from(
        self, stages: list[MegatronStage], path: str | Path, *, new_critic: bool
    ) -> None:
        with folder_weights(
            self._hf_config, path, is_critic=self.config.is_critic, new_critic=new_critic
        ) as read:
            fill(stages, read)

    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> ShardedOptimizer:
        return ShardedOptimizer(self.stages, config, total_steps)

    def _checkpointed(self) -> nn.Module:
        """Its parameters are this rank's shards, so only the same layout can load them."""
        return _Parts(self.stages)

    def _load_hf(self, path: str) -> None:
        self._fill_from(self.stages, path, new_critic=False)

    def forward_backward_batch(
        self, mbs: list[MicroBatch], output_fn: OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        self._require_cuda()
        models = self.stages if forward_only else self.optimizer.models
        return run_micro_batches(models, mbs, output_fn, self.layout, forward_only=forward_only)

    def hf_weights(self) -> Weights:
        """All ranks must iterate to the end; only rank 0 gets tensors."""
        return stream(self.stages)

    def _require_cuda(self) -> None:
        if self.device.type != "cuda":
            raise RuntimeError(
                "megatron-core computes on CUDA devices alone, and this process has none: use "
                "backend archon or fsdp on a CPU"
            )


class _Parts(nn.Module):
    """Stages as one module for the checkpoint: parameter names that identify a rank's shards."""

    def __init__(self, stages: list[MegatronStage]) -> None:
        super().__init__()
        self._tensors = part_names(stages)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()
