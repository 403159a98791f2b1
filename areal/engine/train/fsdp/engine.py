"""FSDPEngine: causal language models of transformers, trained on packed sequences.

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

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.train_engine import TrainEngineConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal.engine.train import base, checkpoint
from areal.engine.train.export import Weights, hand_over, refuse_optimizer, save_beside, sender
from areal.engine.train.fit import check_fsdp
from areal.engine.train.fsdp.model import (
    PackedModel,
    build_model,
    check_model,
    materialise,
    one_rank_mesh,
    recompute_blocks,
    shard_model,
)
from areal.engine.train.fsdp.weights import (
    check_layout,
    cut_over_tp,
    draw_weights,
    load_weights,
    whole_weights,
)
from areal.engine.train.optimizer import MasterOptimizer
from areal.engine.train.packing import pack_rows
from areal.engine.train.process_group import join_ranks, side_group
from areal.models.hf_io import SCORE_HEAD, critic_config, has_score_head, read_hf_config, save_hf
from areal.models.parallel_dims import ParallelDims, ParallelMesh
from areal.utils.device import best_device, use_plain_blas
from areal.utils.hub import model_folder

if TYPE_CHECKING:
    from areal.engine.train.fsdp.lora import Adapters


class FSDPEngine(base.BaseTrainEngine):
    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        """`seed` initializes weights not in `config.path`: adapters, or every weight with
        `config.init_from_scratch`."""
        self.config = config
        self.mb_spec = config.mb_spec
        self.shares_prefixes = False
        self.device = torch.device(best_device())
        self.dp_group: dist.ProcessGroup | None = None
        self._dims = ParallelDims()
        self._mesh: ParallelMesh | None = None  # None on one rank, unless it offloads
        self._seed = seed
        self._version = 0
        self._folder = Path(config.path)  # of the model; for a hub name, once it is initialized
        self._model: PackedModel | None = None
        self._adapters: Adapters | None = None
        self._optimizer: MasterOptimizer | None = None
        self._receiver: tuple[InferenceEngine, WeightUpdateMeta] | None = None
        self._writers: dist.ProcessGroup | None = None  # of checkpoints; None on one rank

    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        """Join the ranks of the layout; call it before `initialize`. No-op for world size 1."""
        num_replicas = self.config.fsdp.num_replicas
        self._dims = ParallelDims.of(parallel_strategy, num_replicas=num_replicas)
        if self._dims.world_size == 1:
            return
        self.config.check_layout(parallel_strategy)
        self.device = join_ranks()
        self._mesh = self._dims.build_mesh(self.device.type)
        self.dp_group = self._mesh.get_group("dp") if self._dims.dp > 1 else None

    @property
    def data_parallel_rank(self) -> int:
        return 0 if self._mesh is None else self._mesh["dp"].get_local_rank()

    @property
    def data_parallel_world_size(self) -> int:
        return self._dims.dp

    def is_data_parallel_head(self) -> bool:
        return self._mesh is None or self._mesh["cp_tp"].get_local_rank() == 0

    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model; with `config.optimizer` and `ft_spec` it can also be trained."""
        if self.device.type == "cpu":
            use_plain_blas()
        offload = self.config.fsdp.offload_params
        if self._mesh is None and offload:
            self._mesh = one_rank_mesh(self.device)
        self._folder = model_folder(self.config.path, weights=not self.config.init_from_scratch)
        check_fsdp(self.config, read_hf_config(self._folder), self._dims)
        optimizer = self.config.optimizer
        model = self._build_model(trains=optimizer is not None and ft_spec is not None)
        materialise(model, self.device, offload=offload)
        self._fill_model(model)
        check_model(model, self.device)
        self._model = model
        self._reshard()
        self._writers = side_group(self._ranks)
        if optimizer is not None and ft_spec is not None:
            self._optimizer = MasterOptimizer(
                model.hf, optimizer, ft_spec.total_train_steps, self._ranks
            )

    def _build_model(self, *, trains: bool) -> PackedModel:
        """On the meta device, sharded for the mesh."""
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
        if self.config.use_lora:
            self._adapters = self._add_adapters(model, trained_dtype)
        if self.config.gradient_checkpointing:
            recompute_blocks(model)
        if self._mesh is not None:
            offload = self.config.fsdp.offload_params
            shard_model(model, self._mesh, compute_dtype=self._dtype(), offload=offload)
        return model

    def _add_adapters(self, model: PackedModel, dtype: torch.dtype) -> Adapters:
        from areal.engine.train.fsdp.lora import Adapters  # needs peft

        return Adapters(
            model.hf,
            rank=self.config.lora_rank,
            alpha=self.config.lora_alpha,
            target_modules=self.config.target_modules,
            dtype=dtype,
            is_critic=self.config.is_critic,
        )

    def _fill_model(self, model: PackedModel) -> None:
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

    def destroy(self) -> None:
        self._model = self._optimizer = self._receiver = self._adapters = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def model(self) -> PackedModel:
        return base.require_model(self._model)

    @property
    def optimizer(self) -> MasterOptimizer:
        return base.require_optimizer(self._optimizer)

    def forward_backward_batch(
        self, mbs: list[base.MicroBatch], output_fn: base.OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        outputs = []
        with torch.set_grad_enabled(not forward_only):
            for index, mb in enumerate(mbs):
                output = output_fn(index, *self._outputs(mb.data))
                if not forward_only:
                    output.backward()
                    self.optimizer.collect_gradients()
                outputs.append(output.detach())
        self._reshard()
        return outputs

    def _outputs(self, mb: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """log p of the next token and entropy, `[T]`, or a critic's values `[T]`.

        At a sequence's last token, log p and entropy are undefined.
        """
        mesh = self._mesh if self._dims.cp > 1 else None
        cp = None if mesh is None else mesh.get_group("cp")
        laid = pack_rows(mb, multiple=self._dims.cp, cp=cp)
        outputs_t = self.model(
            laid.tokens_t,
            laid.positions_t,
            laid.attend,
            laid.labels_t,
            temperature=self.config.temperature,
            chunk_size=self.config.logprobs_chunk_size,
        )
        return laid.whole(outputs_t)

    def optimizer_step(self) -> dict[str, float]:
        return self.optimizer.step()

    def step_lr_scheduler(self) -> None:
        self.optimizer.set_lr_step(self.optimizer.lr_step + 1)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write the folder `meta.path`: atomically as `dcp`; as `hf` pass a scratch folder for
        that. With LoRA it holds the adapter alone."""
        if meta.weight_format == "dcp":
            optimizer = self.optimizer if meta.with_optim else None
            checkpoint.save(meta.path, self.model.hf, optimizer, self._version, self._writers)
            return
        refuse_optimizer(meta)
        adapters = self._adapters
        if adapters is None:
            self._hand_over(self.hf_weights(), lambda weights: self._save_hf(weights, meta))
        else:
            trained = adapters.tensors(is_receiver=self._is_first_rank)
            self._hand_over(trained, lambda tensors: self._save_adapters(adapters, tensors, meta))

    def capture(self) -> Callable[[str | Path], None]:
        model = self.model.hf
        return checkpoint.capture(model, self.optimizer, self._version, self._writers).write

    def _save_hf(self, weights: Weights, meta: SaveLoadMeta) -> None:
        config = read_hf_config(self._folder)
        save_hf(weights, critic_config(config) if self.config.is_critic else config, meta.path)
        save_beside(meta, self._folder)

    def _save_adapters(self, adapters: Adapters, tensors: Weights, meta: SaveLoadMeta) -> None:
        adapters.save(tensors, meta.path, meta.base_model_path or self.config.path)
        save_beside(meta, self._folder)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "dcp":
            optimizer = self.optimizer if meta.with_optim else None
            self._version = checkpoint.load(meta.path, self.model.hf, optimizer, self._writers)
            return
        refuse_optimizer(meta)
        if self._adapters is None:
            load_weights(self.model.hf, meta.path)
        else:
            self._adapters.load(meta.path)
        if self._optimizer is not None:
            self._optimizer.read_model()

    def hf_weights(self) -> Weights:
        """Adapters are merged in. All ranks must iterate to the end; only rank 0 gets tensors."""
        merge = None if self._adapters is None else self._adapters.merge
        return whole_weights(self.model.hf, self._dtype(), merge, is_receiver=self._is_first_rank)

    def _hand_over(self, weights: Weights, consume: Callable[[Weights], None]) -> None:
        hand_over(weights, consume, self._ranks, self.device)

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        self._receiver = (engine, meta)

    def update_weights(self, version: int | WeightUpdateMeta) -> None:
        send = sender(self._receiver, version, are_copies=True)
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
        if self.config.fsdp.offload_params:
            return  # always in host memory
        self.model.to(device)
        if self._optimizer is not None:
            self._optimizer.follow_model(device)

    @property
    def _ranks(self) -> dist.ProcessGroup | None:
        """All ranks of this engine; None for world size 1."""
        return None if self._mesh is None else dist.group.WORLD

    @property
    def _is_first_rank(self) -> bool:
        return self._ranks is None or self._ranks.rank() == 0

    def _reshard(self) -> None:
        """A pass without backward leaves the head unsharded, hence stale after the next step."""
        model = self.model
        if isinstance(model, FSDPModule):
            model.reshard()

    def _dtype(self) -> torch.dtype:
        return base.compute_dtype(self.config, self.device)
