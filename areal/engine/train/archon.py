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
`config.use_lora` only adapters are trained and saved; inference gets them alone, or merged weights.
Rows of a batch may have images (`multi_modal_input`, io_struct.py) if the model has a tower; with
`config.freeze_vision_tower` that is not trained, and on one rank looks at an image once a step.
A batch with `routed_experts` (io_struct.py) is computed by these experts. With
`config.archon.fp8_forward` every forward computes what a native server in FP8 computes; with
`config.archon.fp8_config` linear layers multiply in FP8, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.train.base import BaseTrainEngine, reshard, run_each
from areal.engine.train.export import StageLink, Weights, stream_weights
from areal.engine.train.fit import check_archon, check_replay
from areal.engine.train.images import FrozenSights, MicroImages, no_images, read_images
from areal.engine.train.micro_batches import MicroBatch, OutputFn
from areal.engine.train.optimizer import MasterOptimizer
from areal.engine.train.packing import head_outputs, token_outputs, trace_on_ranks
from areal.engine.train.tree_packing import lay_out_tree
from areal.models import decoder_args, own_config
from areal.models.common.decoder import Decoder
from areal.models.common.fp8_training import train_in_fp8
from areal.models.common.invariant import make_invariant
from areal.models.common.layer_trace import trace_layers
from areal.models.common.moe import balance_experts, replay_experts
from areal.models.hf_io import (
    SCORE_HEAD,
    build_model,
    has_score_head,
    kept_tensors,
    load_hf,
    read_hf_config,
)
from areal.models.lora import Adapters
from areal.models.parallel_dims import ParallelDims, ParallelMesh
from areal.models.parallelize import (
    chain_blocks,
    checkpoint_blocks,
    compile_blocks,
    gather_tokens,
    parallelize,
)
from areal.models.stage_layout import rank_of_last_stage
from areal.utils.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from areal.engine.train.pipeline import Pipeline


class ArchonEngine(BaseTrainEngine[Decoder, MasterOptimizer]):
    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        super().__init__(config, seed=seed)
        self.shares_prefixes = config.enable_tree_training
        self._pipeline: Pipeline | None = None  # None without pipeline parallelism
        self._sights: FrozenSights | None = None  # None where a tower is trained or sharded

    def _dims_of(self, strategy: ParallelStrategy) -> ParallelDims:
        return ParallelDims.of(strategy, num_replicas=self.config.archon.num_replicas)

    def is_data_parallel_head(self) -> bool:
        if self._mesh is None:
            return True
        computes_losses = rank_of_last_stage(self.config.archon.pp_schedule, self._dims.pp)
        place = {axis: self._mesh[axis].get_local_rank() for axis in ("pp", "cp_tp")}
        return place == {"pp": computes_losses, "cp_tp": 0}

    def destroy(self) -> None:
        self._pipeline = None
        super().destroy()

    def _build_model(self, *, trains: bool) -> Decoder:
        self._hf_config = own_config(read_hf_config(self._folder))
        check_archon(self.config, decoder_args(self._hf_config), self._dims)
        model = self._build_whole() if self._mesh is None else self._build_shards(self._mesh)
        self._fill(model)
        if self.config.batch_invariant:
            make_invariant(model)
        self._speed_up_blocks(model)
        return model

    def _build_whole(self) -> Decoder:
        model = build_model(
            self._hf_config,
            device=self.device,
            dtype=self._dtype(),
            is_critic=self.config.is_critic,
        )
        self._prepare(model)
        return model

    def _build_shards(self, mesh: ParallelMesh) -> Decoder:
        model = build_model(
            self._hf_config, device="meta", dtype=torch.float32, is_critic=self.config.is_critic
        )
        self._prepare(model)
        if self._dims.pp > 1:
            from areal.engine.train.pipeline import (
                Pipeline,  # a second of imports others do not need
            )

            self._pipeline = Pipeline(model, mesh, self.config, self._dtype(), self.device)
            return model
        parallelize(model, mesh, self._dtype(), reduce_dtype=self._reduce_dtype())
        return model.to_empty(device=self.device)

    def _prepare(self, model: Decoder) -> None:
        """Replace layers, before anything is sharded."""
        if self.config.archon.fp8_forward:
            model.round_to_fp8()
        if self.config.archon.trains_in_fp8:
            train_in_fp8(model, self.config.archon.fp8_config.exclude_modules)
        if self.config.freeze_vision_tower and model.tower is not None:
            model.tower.requires_grad_(False)
        if self.config.use_lora:
            self._adapters = Adapters(
                model,
                rank=self.config.lora_rank,
                alpha=self.config.lora_alpha,
                target_modules=self.config.target_modules,
            )
        is_alone = self._mesh is None and self.config.optimizer is not None
        if is_alone and model.tower is not None and not _is_trained(model.tower):
            self._sights = FrozenSights(model.look, model.args.vision_args.num_tokens)

    def _fill(self, model: Decoder) -> None:
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

    def _speed_up_blocks(self, model: Decoder) -> None:
        archon = self.config.archon
        ac_mode = archon.ac_mode if self.config.gradient_checkpointing else "none"
        has_budget = ac_mode == "memory_budget"
        if archon.enable_compile:
            compile_blocks(model, archon.ac_memory_budget if has_budget else None)
        checkpoint_blocks(
            model,
            ac_mode,
            selective_option=archon.selective_ac_option,
            compiled=archon.enable_compile,
        )
        is_whole_on_gpu = self._mesh is None and self.device.type == "cuda"
        if archon.enable_compile and is_whole_on_gpu and not has_budget:
            chain_blocks(model)

    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> MasterOptimizer:
        stages = self._dims.pp
        return MasterOptimizer(self.model, config, total_steps, self._ranks, num_stages=stages)

    def _checkpointed(self) -> nn.Module:
        return self.model

    def load(self, meta: SaveLoadMeta) -> None:
        self._forget_sights()
        super().load(meta)

    def _forget_sights(self) -> None:
        if self._sights is not None:
            self._sights.clear()

    def _load_hf(self, path: str) -> None:
        load_hf(self.model, path)

    def _save_hf(self, weights: Weights, meta: SaveLoadMeta) -> None:
        if not self.config.init_from_scratch:
            weights = chain(weights, kept_tensors(self._folder, self.model))
        super()._save_hf(weights, meta)

    def _weights_changed(self) -> None:
        if self._pipeline is not None:
            self._pipeline.refresh()

    @property
    def _parts(self) -> list[Decoder]:
        """The model, or this rank's pipeline stages."""
        return [self.model] if self._pipeline is None else self._pipeline.parts

    def forward_backward_batch(
        self, mbs: list[MicroBatch], output_fn: OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        if self._pipeline is not None:
            run = self._pipeline.forward if forward_only else self._pipeline.train
            return run(mbs, output_fn)
        collect = None if forward_only else self.optimizer.collect_gradients
        outputs = run_each(mbs, self._token_outputs, output_fn, collect)
        replay_experts(self.model, None)
        reshard(self.model)
        return outputs

    def _check_replay(self) -> None:
        check_replay(decoder_args(self._hf_config), self._dims)

    def _read_images(self, data: dict[str, Any]) -> MicroImages | None:
        return read_images(data, self.model.args, self.device)

    def _complete_images(self, mbs: list[MicroBatch]) -> list[MicroBatch]:
        blank = no_images(self.model.args.vision_args, self.device)
        return [mb if mb.images is not None else replace(mb, images=blank) for mb in mbs]

    def _token_outputs(self, mb: MicroBatch) -> tuple[torch.Tensor, ...]:
        if mb.tree is None:
            context = (self.config, self._mesh, mb.images, self._sights)
            return token_outputs(self.model, mb.data, *context)
        return self._tree_outputs(mb.data, mb.tree)

    def _tree_outputs(self, data: dict[str, Any], tree: PrefixTree) -> tuple[torch.Tensor, ...]:
        mesh, is_critic = self._mesh, self.config.is_critic
        options: dict[str, Any] = {"is_critic": is_critic}
        if mesh is not None:
            options |= {"multiple": mesh["cp_tp"].size(), "cp": mesh.get_group("cp")}
        laid = lay_out_tree(data, tree, **options)
        replay_experts(self.model, laid.routed_tLK)
        hidden_tD = self.model(laid.tokens_t, laid.positions_t, laid.attend)
        if isinstance(hidden_tD, DTensor):  # sharded over tp
            hidden_tD = gather_tokens(hidden_tD, partial_grad=not is_critic)
        hidden_rD = hidden_tD.index_select(0, laid.rows_r)
        return laid.whole(head_outputs(self.model, hidden_rD, laid.labels_r, self.config, mesh))

    def optimizer_step(self) -> dict[str, float]:
        stats = super().optimizer_step()
        group = self._mesh and self._mesh.get_group("stage")
        for part in self._parts:
            balance_experts(part, group=group)
        return stats

    def hf_weights(self) -> Weights:
        """Adapters are merged in. All ranks must iterate to the end; only rank 0 gets tensors."""
        if self._mesh is None and self._adapters is None:
            return self.model.named_hf_tensors()
        merge = None if self._adapters is None else self._adapters.merge
        return stream_weights(
            self.model,
            self._dtype(),
            is_receiver=self._is_first_rank,
            merge=merge,
            link=self._stage_link(),
        )

    def _as_in_checkpoint(self, weights: Weights) -> Weights:
        if "text_config" not in read_hf_config(self._folder):
            return weights
        rename = self.model.adapter.multimodal_hf_name
        return ((rename(name), tensor) for name, tensor in weights)

    def layer_trace(self, tokens: Sequence[int]) -> dict[str, Any]:
        if self._pipeline is not None:
            raise NotImplementedError("the layers of a pipeline are not traced: each rank has some")
        if self._mesh is None:
            return trace_layers(self.model, tokens)
        trace = trace_on_ranks(self.model, tokens, self.config, self._mesh, self.device)
        reshard(self.model)
        return trace

    def _stage_link(self) -> StageLink | None:
        if self._pipeline is None or self._mesh is None:
            return None
        group = self._mesh.get_group("pp")
        reaches_receiver = dist.get_global_rank(group, 0) == 0
        return StageLink(self._pipeline.layout, group, reaches_receiver, self.device)

    def _move(self, device: torch.device | str) -> None:
        self._forget_sights()
        for part in self._parts:
            part.to(device)
        if self._optimizer is not None:
            self._optimizer.follow_model(device)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
