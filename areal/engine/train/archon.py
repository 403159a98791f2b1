"""Archon: areal's own models trained on one rank or many, on CPUs or GPUs.

The model is the module the native engine decodes with, so their log-probabilities agree to float
rounding. With one torch thread on a CPU, training is a function of (weights, batches): two equal
runs, or a run resumed from `save(dcp)`, end with the same bits.

    engine = ArchonEngine(config)
    engine.create_process_group(parallel_strategy)     # only for several ranks, each in a process
    engine.initialize(ft_spec)
    engine.train_batch(batch, loss_fn, loss_weight_fn); engine.step_lr_scheduler()

All ranks make every call. Ranks with the same data-parallel index (tensor, context and pipeline
ranks) pass the same rows; other indices pass other rows, possibly none. Results are equal on all
ranks, except the rows of `forward_batch`. Loss functions run on the last pipeline stage only.

With `config.is_critic` the model has a score head in place of the LM head, and values replace
log-probabilities; a critic that starts from a language model has value 0 everywhere at first. With
`config.use_lora` only adapters are trained and saved; weights sent to inference have them merged.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.train_engine import TrainEngineConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal.engine.train import base, checkpoint
from areal.engine.train.export import (
    StageLink,
    Weights,
    hand_over,
    refuse_optimizer,
    save_beside,
    sender,
    stream_weights,
)
from areal.engine.train.fit import check_archon
from areal.engine.train.optimizer import MasterOptimizer
from areal.engine.train.packing import token_outputs, tree_outputs
from areal.engine.train.process_group import join_ranks, side_group
from areal.models import decoder_args
from areal.models.common.decoder import Decoder
from areal.models.common.invariant import make_invariant
from areal.models.common.moe import balance_experts
from areal.models.hf_io import (
    SCORE_HEAD,
    build_model,
    critic_config,
    has_score_head,
    language_config,
    load_hf,
    read_hf_config,
    save_hf,
)
from areal.models.lora import Adapters
from areal.models.parallel_dims import ParallelDims, ParallelMesh
from areal.models.parallelize import checkpoint_blocks, compile_blocks, parallelize
from areal.models.stage_layout import rank_of_last_stage
from areal.utils.device import best_device, use_plain_blas
from areal.utils.hub import model_folder

if TYPE_CHECKING:
    from areal.engine.train.pipeline import Pipeline


class ArchonEngine(base.BaseTrainEngine):
    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        """`seed` draws the weights with `config.init_from_scratch`."""
        self.config = config
        self.mb_spec = config.mb_spec
        self.shares_prefixes = config.enable_tree_training
        self.device = torch.device(best_device())
        self.dp_group: dist.ProcessGroup | None = None
        self._dims = ParallelDims()
        self._mesh: ParallelMesh | None = None  # None on one rank
        self._pipeline: Pipeline | None = None  # None without pipeline parallelism
        self._seed = seed
        self._version = 0
        self._folder = Path(config.path)  # of the model; for a hub name, once it is initialized
        self._model: Decoder | None = None
        self._adapters: Adapters | None = None
        self._optimizer: MasterOptimizer | None = None
        self._receiver: tuple[InferenceEngine, WeightUpdateMeta] | None = None
        self._writers: dist.ProcessGroup | None = None  # of checkpoints; None on one rank

    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        """Join the ranks of the layout; call it before `initialize`. No-op for world size 1."""
        num_replicas = self.config.archon.num_replicas
        self._dims = ParallelDims.of(parallel_strategy, num_replicas=num_replicas)
        if self._dims.world_size == 1:
            return
        self.config.check_layout(parallel_strategy)
        self.device = join_ranks()
        self._mesh = self._dims.build_mesh(self.device.type)
        self.dp_group = self._mesh.get_group("dp") if self._dims.dp > 1 else None

    @property
    def min_micro_batches(self) -> int:
        """One per pipeline stage, so that no stage idles."""
        return self._dims.pp

    @property
    def data_parallel_rank(self) -> int:
        return 0 if self._mesh is None else self._mesh["dp"].get_local_rank()

    @property
    def data_parallel_world_size(self) -> int:
        return self._dims.dp

    def is_data_parallel_head(self) -> bool:
        if self._mesh is None:
            return True
        computes_losses = rank_of_last_stage(self.config.archon.pp_schedule, self._dims.pp)
        place = {axis: self._mesh[axis].get_local_rank() for axis in ("pp", "cp_tp")}
        return place == {"pp": computes_losses, "cp_tp": 0}

    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model; with `config.optimizer` and `ft_spec` it can also be trained."""
        if self.device.type == "cpu":
            use_plain_blas()
        self._folder = model_folder(self.config.path, weights=not self.config.init_from_scratch)
        self._hf_config = language_config(read_hf_config(self._folder))
        check_archon(self.config, decoder_args(self._hf_config), self._dims)
        self._model = self._build_model() if self._mesh is None else self._build_shards(self._mesh)
        self._fill_model(self._model)
        if self.config.batch_invariant:
            make_invariant(self._model)
        self._speed_up_blocks(self._model)
        self._writers = side_group(self._ranks)
        if self.config.optimizer is not None and ft_spec is not None:
            self._optimizer = MasterOptimizer(
                self._model,
                self.config.optimizer,
                ft_spec.total_train_steps,
                self._ranks,
                num_stages=self._dims.pp,
            )

    def _speed_up_blocks(self, model: Decoder) -> None:
        archon = self.config.archon
        ac_mode = archon.ac_mode if self.config.gradient_checkpointing else "none"
        if archon.enable_compile:
            has_budget = ac_mode == "memory_budget"
            compile_blocks(model, archon.ac_memory_budget if has_budget else None)
        checkpoint_blocks(
            model,
            ac_mode,
            selective_option=archon.selective_ac_option,
            compiled=archon.enable_compile,
        )

    def _build_model(self) -> Decoder:
        model = build_model(
            self._hf_config,
            device=self.device,
            dtype=self._dtype(),
            is_critic=self.config.is_critic,
        )
        self._add_adapters(model)
        return model

    def _build_shards(self, mesh: ParallelMesh) -> Decoder:
        model = build_model(
            self._hf_config, device="meta", dtype=torch.float32, is_critic=self.config.is_critic
        )
        if self._dims.pp > 1:
            from areal.engine.train.pipeline import (
                Pipeline,  # a second of imports others do not need
            )

            self._pipeline = Pipeline(model, mesh, self.config, self._dtype(), self.device)
            return model
        self._add_adapters(model)
        parallelize(model, mesh, self._dtype())
        return model.to_empty(device=self.device)

    def _add_adapters(self, model: Decoder) -> None:
        if self.config.use_lora:
            self._adapters = Adapters(
                model,
                rank=self.config.lora_rank,
                alpha=self.config.lora_alpha,
                target_modules=self.config.target_modules,
            )

    @property
    def _parts(self) -> list[Decoder]:
        """The model, or this rank's pipeline stages."""
        return [self.model] if self._pipeline is None else self._pipeline.parts

    @property
    def _ranks(self) -> dist.ProcessGroup | None:
        """All ranks of this engine; None for world size 1."""
        return None if self._mesh is None else dist.group.WORLD

    @property
    def _is_first_rank(self) -> bool:
        return self._ranks is None or self._ranks.rank() == 0

    def _fill_model(self, model: Decoder) -> None:
        path = self._folder
        if self.config.init_from_scratch:
            model.init_weights(self._seed)
        elif self.config.is_critic and not has_score_head(path):
            model.init_score()
            load_hf(model, path, without=[SCORE_HEAD])
        else:
            load_hf(model, path)
        if self._adapters is not None:
            self._adapters.draw(self._seed)
        self._weights_changed()

    def _weights_changed(self) -> None:
        if self._pipeline is not None:
            self._pipeline.refresh()

    def destroy(self) -> None:
        self._model = self._optimizer = self._receiver = self._adapters = self._pipeline = None
        if self.device.type == "cuda":
            gc.collect()  # compiled and checkpointed blocks refer to themselves
            torch.cuda.empty_cache()

    @property
    def model(self) -> Decoder:
        return base.require_model(self._model)

    @property
    def optimizer(self) -> MasterOptimizer:
        return base.require_optimizer(self._optimizer)

    def forward_backward_batch(
        self, mbs: list[base.MicroBatch], output_fn: base.OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        if self._pipeline is not None:
            run = self._pipeline.forward if forward_only else self._pipeline.train
            return run(mbs, output_fn)
        outputs = []
        with torch.set_grad_enabled(not forward_only):
            for index, mb in enumerate(mbs):
                output = output_fn(index, *self._token_outputs(mb))
                if not forward_only:
                    output.backward()
                    self.optimizer.collect_gradients()
                outputs.append(output.detach())
        model = self.model
        if isinstance(model, FSDPModule):
            model.reshard()  # a pass without backward leaves the head unsharded, hence stale later
        return outputs

    def _token_outputs(self, mb: base.MicroBatch) -> tuple[torch.Tensor, ...]:
        if mb.tree is None:
            return token_outputs(self.model, mb.data, self.config, self._mesh)
        return tree_outputs(self.model, mb.data, mb.tree, self.config, self._mesh)

    def optimizer_step(self) -> dict[str, float]:
        stats = self.optimizer.step()
        self._weights_changed()
        group = self._mesh and self._mesh.get_group("stage")
        for part in self._parts:
            balance_experts(part, group=group)
        return stats

    def step_lr_scheduler(self) -> None:
        self.optimizer.set_lr_step(self.optimizer.lr_step + 1)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write the folder `meta.path`: atomically as `dcp`; as `hf` pass a scratch folder for
        that. With LoRA `hf` is the adapter alone, as peft saves it."""
        if meta.weight_format == "dcp":
            optimizer = self.optimizer if meta.with_optim else None
            checkpoint.save(meta.path, self.model, optimizer, self._version, self._writers)
            return
        refuse_optimizer(meta)
        adapters = self._adapters
        if adapters is None:
            self._hand_over(self.hf_weights(), lambda weights: self._save_hf(weights, meta))
        else:
            trained = adapters.tensors(is_receiver=self._is_first_rank)
            self._hand_over(trained, lambda tensors: self._save_adapters(adapters, tensors, meta))

    def capture(self) -> Callable[[str | Path], None]:
        return checkpoint.capture(self.model, self.optimizer, self._version, self._writers).write

    def _save_hf(self, weights: Weights, meta: SaveLoadMeta) -> None:
        config = critic_config(self._hf_config) if self.config.is_critic else self._hf_config
        save_hf(weights, config, meta.path)
        save_beside(meta, self._folder)

    def _save_adapters(self, adapters: Adapters, tensors: Weights, meta: SaveLoadMeta) -> None:
        adapters.save(tensors, meta.path, meta.base_model_path or self.config.path)
        save_beside(meta, self._folder)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "dcp":
            self._version = checkpoint.load(
                meta.path, self.model, self.optimizer if meta.with_optim else None, self._writers
            )
            self._weights_changed()
            return
        refuse_optimizer(meta)
        if self._adapters is None:
            load_hf(self.model, meta.path)
        else:
            self._adapters.load(meta.path)
        self._weights_changed()
        if self._optimizer is not None:
            self._optimizer.read_model()

    def hf_weights(self) -> Weights:
        """Adapters are merged in. All ranks must iterate to the end; only rank 0 gets tensors."""
        if self._mesh is None and self._adapters is None:
            return self.model.named_hf_tensors()
        merge = None if self._adapters is None else self._adapters.merge
        link = None
        if self._pipeline is not None and self._mesh is not None:
            group = self._mesh.get_group("pp")
            reaches_receiver = dist.get_global_rank(group, 0) == 0
            link = StageLink(self._pipeline.layout, group, reaches_receiver, self.device)
        return stream_weights(
            self.model, self._dtype(), is_receiver=self._is_first_rank, merge=merge, link=link
        )

    def _hand_over(self, weights: Weights, consume: Callable[[Weights], None]) -> None:
        hand_over(weights, consume, self._ranks, self.device)

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        self._receiver = (engine, meta)

    def update_weights(self, version: int | WeightUpdateMeta) -> None:
        is_merged = self._adapters is not None
        send = sender(self._receiver, version, are_copies=is_merged)
        self._hand_over(self.hf_weights(), send)

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def offload(self) -> None:
        self._move("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        for part in self._parts:
            part.to(device)
        if self._optimizer is not None:
            self._optimizer.follow_model(device)

    def _dtype(self) -> torch.dtype:
        return base.compute_dtype(self.config, self.device)
