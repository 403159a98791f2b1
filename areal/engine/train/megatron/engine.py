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

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.train_engine import TrainEngineConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal.engine.train import base, checkpoint
from areal.engine.train.export import Weights, hand_over, refuse_optimizer, save_beside, sender
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
from areal.engine.train.process_group import join_ranks, side_group
from areal.models import decoder_args
from areal.models.hf_io import critic_config, language_config, read_hf_config, save_hf
from areal.utils.device import best_device
from areal.utils.hub import model_folder


class MegatronEngine(base.BaseTrainEngine):
    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        """`seed` draws the weights with `config.init_from_scratch`."""
        self.config = config
        self.mb_spec = config.mb_spec
        self.device = torch.device(best_device())
        self.dp_group: dist.ProcessGroup | None = None
        self.shares_prefixes = False
        self._strategy = ParallelStrategy()
        self._layout: Layout | None = None
        self._seed = seed
        self._version = 0
        self._folder = Path(config.path)  # of the model; for a hub name, once it is initialized
        self._stages: list[MegatronStage] | None = None
        self._optimizer: ShardedOptimizer | None = None
        self._receiver: tuple[InferenceEngine, WeightUpdateMeta] | None = None
        self._writers: dist.ProcessGroup | None = None  # of checkpoints; None on one rank

    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        """Join the ranks of the layout before `initialize`. Optional for world size 1."""
        self._strategy = parallel_strategy
        if parallel_strategy.world_size > 1:
            self.device = join_ranks()
        self._layout = enter_layout(parallel_strategy, self.device)
        self._writers = side_group(self._ranks)
        self.dp_group = self._layout.dp if self._layout.dp.size() > 1 else None

    @property
    def min_micro_batches(self) -> int:
        """One per pipeline rank, so that none idles."""
        return self._strategy.pipeline_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        return self.layout.dp.rank()

    @property
    def data_parallel_world_size(self) -> int:
        return self._strategy.data_parallel_size

    def is_data_parallel_head(self) -> bool:
        return self.layout.is_head

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise RuntimeError("the engine has no layout yet: call initialize() first")
        return self._layout

    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model; with `config.optimizer` and `ft_spec` it can also be trained."""
        optimizer = self.config.optimizer
        if optimizer is not None and ft_spec is not None:
            self._require_cuda()
        if self._layout is None:
            self.create_process_group(self._strategy)
        self._folder = model_folder(self.config.path, weights=not self.config.init_from_scratch)
        self._hf_config = language_config(read_hf_config(self._folder))
        stages = self._build_stages()
        mark_parts(stages)
        self._fill(stages)
        self._stages = stages
        if optimizer is not None and ft_spec is not None:
            self._optimizer = ShardedOptimizer(stages, optimizer, ft_spec.total_train_steps)

    def _build_stages(self) -> list[MegatronStage]:
        config = self.config
        args = decoder_args(self._hf_config, is_critic=config.is_critic)
        check_megatron(config, args, self._strategy)
        return build_stages(args, self.layout, config, dtype=self._dtype(), device=self.device)

    def _fill(self, stages: list[MegatronStage]) -> None:
        if self.config.init_from_scratch:
            fill(stages, drawn_weights(self._hf_config, self._seed, self.config.is_critic))
        else:
            self._fill_from(stages, self._folder, new_critic=self.config.is_critic)

    def _fill_from(
        self, stages: list[MegatronStage], path: str | Path, *, new_critic: bool
    ) -> None:
        with folder_weights(
            self._hf_config, path, is_critic=self.config.is_critic, new_critic=new_critic
        ) as read:
            fill(stages, read)

    def destroy(self) -> None:
        """The process groups stay: other engines of this process use them too."""
        self._stages = self._optimizer = self._receiver = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def stages(self) -> list[MegatronStage]:
        """This rank's stages: one, or several with a virtual pipeline."""
        return base.require_model(self._stages)

    @property
    def optimizer(self) -> ShardedOptimizer:
        return base.require_optimizer(self._optimizer)

    def forward_backward_batch(
        self, mbs: list[base.MicroBatch], output_fn: base.OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        self._require_cuda()
        models = self.stages if forward_only else self.optimizer.models
        return run_micro_batches(models, mbs, output_fn, self.layout, forward_only=forward_only)

    def optimizer_step(self) -> dict[str, float]:
        return self.optimizer.step()

    def step_lr_scheduler(self) -> None:
        self.optimizer.set_lr_step(self.optimizer.lr_step + 1)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write the folder `meta.path`: as `dcp` atomically, for the layout that wrote it; as `hf`
        pass a scratch folder for that."""
        if meta.weight_format == "dcp":
            optimizer = self.optimizer if meta.with_optim else None
            checkpoint.save(meta.path, _Parts(self.stages), optimizer, self._version, self._writers)
            return
        refuse_optimizer(meta)
        self._hand_over(lambda weights: self._save_hf(weights, meta))

    def capture(self) -> Callable[[str | Path], None]:
        parts = _Parts(self.stages)
        return checkpoint.capture(parts, self.optimizer, self._version, self._writers).write

    def _save_hf(self, weights: Weights, meta: SaveLoadMeta) -> None:
        config = critic_config(self._hf_config) if self.config.is_critic else self._hf_config
        save_hf(weights, config, meta.path)
        save_beside(meta, self._folder)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "dcp":
            optimizer = self.optimizer if meta.with_optim else None
            parts = _Parts(self.stages)
            self._version = checkpoint.load(meta.path, parts, optimizer, self._writers)
        else:
            refuse_optimizer(meta)
            self._fill_from(self.stages, meta.path, new_critic=False)
        if self._optimizer is not None and not meta.with_optim:
            self._optimizer.read_model()

    def hf_weights(self) -> Weights:
        """All ranks must iterate to the end; only rank 0 gets tensors."""
        return stream(self.stages)

    def _hand_over(self, consume: Callable[[Weights], None]) -> None:
        hand_over(self.hf_weights(), consume, self._ranks, self.device)

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        self._receiver = (engine, meta)

    def update_weights(self, version: int | WeightUpdateMeta) -> None:
        self._hand_over(sender(self._receiver, version, are_copies=True))

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    @property
    def _ranks(self) -> dist.ProcessGroup | None:
        """All ranks of this engine; None for world size 1."""
        return dist.group.WORLD if self._strategy.world_size > 1 else None

    def _dtype(self) -> torch.dtype:
        return base.compute_dtype(self.config, self.device)

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
