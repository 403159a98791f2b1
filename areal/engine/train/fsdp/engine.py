"""FSDPEngine: language and image-text models of transformers, trained on packed sequences.

    engine = FSDPEngine(config)
    engine.create_process_group(parallel_strategy)     # only for several ranks, each in a process
    engine.initialize(ft_spec)
    engine.train_batch(batch, loss_fn, loss_weight_fn); engine.step_lr_scheduler()

On one rank the model is a plain module in the compute dtype with float32 masters beside it; on
several, FSDP2 shards the float32 weights and gathers them block by block. All ranks make every
call; ranks with the same data-parallel index (tensor and context ranks) pass the same rows.

With `config.is_critic` the model is transformers' sequence classifier with one label, whose score
of each token is its value. With `config.use_lora` only adapters are trained and saved; weights sent
to inference have them merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.engine.train.base import BaseTrainEngine, reshard, run_each
from areal.engine.train.export import Weights
from areal.engine.train.fit import SEEN_AHEAD, check_fsdp, sees_ahead
from areal.engine.train.fsdp.images import (
    HfImages,
    check_images,
    fill_blank,
    read_images,
    share_example,
)
from areal.engine.train.fsdp.model import (
    PackedModel,
    build_model,
    check_model,
    materialise,
    pack_alone,
    recompute_blocks,
    shard_model,
    traced_modules,
)
from areal.engine.train.fsdp.weights import (
    check_layout,
    cut_over_tp,
    draw_weights,
    load_weights,
    whole_weights,
)
from areal.engine.train.images import refuse_images
from areal.engine.train.micro_batches import MicroBatch, OutputFn
from areal.engine.train.optimizer import MasterOptimizer
from areal.engine.train.packing import pack_rows
from areal.engine.train.process_group import join_alone
from areal.engine.train.tree_packing import lay_out_tree
from areal.models.common.layer_trace import trace_modules
from areal.models.hf_io import SCORE_HEAD, has_score_head, read_hf_config
from areal.models.parallel_dims import ParallelDims
from areal.utils.data import MULTI_MODAL_KEY


class FSDPEngine(BaseTrainEngine[PackedModel, MasterOptimizer]):
    # A row with images that all ranks have, once one of them had any.
    _example: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None

    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        super().__init__(config, seed=seed)
        self.shares_prefixes = config.enable_tree_training

    def _dims_of(self, strategy: ParallelStrategy) -> ParallelDims:
        return ParallelDims.of(strategy, num_replicas=self.config.fsdp.num_replicas)

    def is_data_parallel_head(self) -> bool:
        return self._mesh is None or self._mesh["cp_tp"].get_local_rank() == 0

    def _build_model(self, *, trains: bool) -> PackedModel:
        offload = self.config.fsdp.offload_params
        if self._mesh is None and offload:  # FSDP offloads, also from one rank
            join_alone(self.device)
            self._ranks = dist.group.WORLD
            self._create_groups(ParallelStrategy())
        self._hf_config = read_hf_config(self._folder)
        check_fsdp(self.config, self._hf_config, self._dims)
        model = self._build_shards(trains=trains)
        materialise(model, self.device, offload=offload)
        self._fill(model)
        check_model(model, self.device)
        reshard(model)
        return model

    def _build_shards(self, *, trains: bool) -> PackedModel:
        """On the meta device."""
        # Shards that are trained are their own masters, hence float32.
        trained_dtype = self._dtype() if self._mesh is None else torch.float32
        all_trained = trains and not self.config.use_lora
        model = build_model(
            self._folder,
            dtype=trained_dtype if all_trained else self._dtype(),
            is_critic=self.config.is_critic,
        )
        check_layout(model.hf, self._dims)
        if self._mesh is not None and self._dims.tp > 1:
            cut_over_tp(model.hf, self._mesh["tp"])
        if self.config.freeze_vision_tower:
            model.freeze_tower()
        if self.config.use_lora:
            self._add_adapters(model, trained_dtype)
        if self.config.gradient_checkpointing:
            recompute_blocks(model)
        if self._mesh is not None:
            shard_model(
                model,
                self._mesh,
                compute_dtype=self._dtype(),
                reduce_dtype=self._reduce_dtype(),
                offload=self.config.fsdp.offload_params,
            )
        return model

    def _add_adapters(self, model: PackedModel, dtype: torch.dtype) -> None:
        from areal.engine.train.fsdp.lora import Adapters  # needs peft

        self._adapters = Adapters(
            model.hf,
            rank=self.config.lora_rank,
            alpha=self.config.lora_alpha,
            target_modules=self.config.target_modules,
            dtype=dtype,
            is_critic=self.config.is_critic,
        )

    def _fill(self, model: PackedModel) -> None:
        path, hf = self._folder, model.hf
        if self.config.init_from_scratch:
            draw_weights(hf, self._seed)
        elif self.config.is_critic and not has_score_head(path):
            # As in Archon: a new critic has value 0 everywhere.
            model.score_head.weight.detach().zero_()
            load_weights(hf, path, without=[SCORE_HEAD])
        else:
            load_weights(hf, path)
        if self._adapters is not None:
            self._adapters.draw(self._seed)

    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> MasterOptimizer:
        return MasterOptimizer(self.model.hf, config, total_steps, self._ranks)

    def _checkpointed(self) -> nn.Module:
        return self.model.hf

    def _load_hf(self, path: str) -> None:
        load_weights(self.model.hf, path)

    def forward_backward_batch(
        self, mbs: list[MicroBatch], output_fn: OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        collect = None if forward_only else self.optimizer.collect_gradients
        outputs = run_each(mbs, self._token_outputs, output_fn, collect)
        reshard(self.model)
        return outputs

    def _micro_batches(self, input_: Mapping[str, Any], rows_per_unit: int) -> list[MicroBatch]:
        mbs = super()._micro_batches(input_, rows_per_unit)
        if self.dp_group is None and any(mb.images is not None for mb in mbs):
            return self._complete_images(mbs)
        return mbs

    def _read_images(self, data: dict[str, Any]) -> HfImages | None:
        rows, hf = data.get(MULTI_MODAL_KEY), self.model.hf
        sees = "vision_config" in self._hf_config and not self.config.is_critic
        if not sees:
            refuse_images(rows, f"this {self._hf_config['model_type']} is no image-text model")
        if self._dims.tp > 1 or self._dims.cp > 1:
            refuse_images(rows, "fsdp computes them with data parallelism alone")
        if sees_ahead(self._hf_config):
            refuse_images(rows, SEEN_AHEAD)
        return read_images(data, hf, self.device) if sees else None

    def _complete_images(self, mbs: list[MicroBatch]) -> list[MicroBatch]:
        if self._example is None:
            self._example = share_example(mbs, self.dp_group)
            check_images(self.model, self._example, self.device)
            reshard(self.model)
        return mbs if self.dp_group is None else fill_blank(mbs, self._example[1])

    def _token_outputs(self, mb: MicroBatch) -> tuple[torch.Tensor, ...]:
        """log p of the next token and entropy, `[T]`, or a critic's values `[T]`.

        At a sequence's last token, log p and entropy are undefined.
        """
        mesh = self._mesh if self._dims.cp > 1 else None
        cp = None if mesh is None else mesh.get_group("cp")
        if mb.tree is not None:
            is_critic = self.config.is_critic
            laid = lay_out_tree(
                mb.data, mb.tree, is_critic=is_critic, multiple=self._dims.cp, cp=cp
            )
            labels, rows = laid.labels_r, laid.rows_r
        else:
            laid = pack_rows(mb.data, multiple=self._dims.cp, cp=cp)
            labels, rows = laid.labels_t, None
        outputs = self.model(
            laid.tokens_t,
            laid.positions_t,
            laid.attend,
            labels,
            rows_T=rows,
            images=mb.images,
            temperature=self.config.temperature,
            chunk_size=self.config.logprobs_chunk_size,
        )
        return laid.whole(outputs)

    def hf_weights(self) -> Weights:
        """Adapters are merged in. All ranks must iterate to the end; only rank 0 gets tensors."""
        merge = None if self._adapters is None else self._adapters.merge
        return whole_weights(self.model.hf, self._dtype(), merge, is_receiver=self._is_first_rank)

    def layer_trace(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Without routers and architecture, which transformers spells otherwise."""
        if self._dims.tp > 1 or self._dims.cp > 1:
            raise NotImplementedError(
                "backend fsdp shows its layers on data-parallel ranks: not with t or c"
            )
        tokens_T = torch.tensor(list(tokens), device=self.device)
        layers = trace_modules(
            traced_modules(self.model), lambda: self.model(*pack_alone(tokens_T), tokens_T)
        )
        reshard(self.model)
        return {"layers": layers, "experts": {}, "args": {}}

    def _move(self, device: torch.device | str) -> None:
        if self.config.fsdp.offload_params:
            return  # always in host memory
        self.model.to(device)
        if self._optimizer is not None:
            self._optimizer.follow_model(device)
