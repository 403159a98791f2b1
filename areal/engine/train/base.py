"""What training engines share: all but the model itself.

An engine builds, shards, fills, runs and exports its model (the hooks of `BaseTrainEngine`); ranks,
batches, the optimizer's steps, checkpoints, versions and weight updates are written once, here:

    padded batch [B, S] -> packed micro-batches [T] -> forward (and backward) -> optimizer step

A loss function returns the mean over its micro-batch. Each is scaled by its share of the total
weight, summed over ranks, so the result is the mean over the whole batch, however it was split.
"""

from __future__ import annotations

import gc
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal.api.alloc_mode import ParallelStrategy
from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.api.engine_api import InferenceEngine, TrainEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal.api.routed_experts import ROUTED_KEY
from areal.engine.stored_weights import checksum_as
from areal.engine.train import checkpoint
from areal.engine.train.export import StageLink, Weights, send_weights, stream_adapters
from areal.engine.train.images import refuse_images
from areal.engine.train.micro_batches import MicroBatch, OutputFn, fill_up, split_micro_batches
from areal.engine.train.process_group import any_rank, join_ranks, side_group
from areal.models.hf_io import critic_config, save_hf
from areal.models.lora import LoraAdapters
from areal.models.parallel_dims import ParallelDims, ParallelMesh
from areal.utils import stats_tracker
from areal.utils.data import MULTI_MODAL_KEY, unpack
from areal.utils.device import best_device, keep_freed_memory, use_plain_blas
from areal.utils.hub import model_folder
from areal.utils.waits import progress
from areal.weight_sync.bucket import Checksums

# (logprobs_T, entropy_T, micro-batch) -> loss, or (values_T, micro-batch) -> loss of a critic.
LossFn = Callable[..., torch.Tensor]
LossWeightFn = Callable[[dict[str, Any]], torch.Tensor]
# Of the folder a model was loaded from: how to sample, and how images are cut.
_BESIDE_WEIGHTS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class Optimizer(checkpoint.Resumable, Protocol):
    def step(self) -> dict[str, float]:
        """Clip, update, clear the gradients; reports update_successful, grad_norm and lr."""
        ...

    def read_model(self) -> None:
        """Copy the model's weights, just loaded, into the masters."""
        ...

    def forget_gradients(self) -> None: ...


ModelT = TypeVar("ModelT")
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


class BaseTrainEngine(TrainEngine, Generic[ModelT, OptimizerT]):
    """The abstract methods, private ones too, are what an engine implements."""

    shares_prefixes = False  # computes common prefixes of a micro-batch once

    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        """`seed` draws the weights that are not in `config.path`: adapters, or all of them with
        `config.init_from_scratch`."""
        self.config = config
        self.mb_spec = config.mb_spec
        self.device = torch.device(best_device())
        self.dp_group: dist.ProcessGroup | None = None  # with other rows of the batch; None is one
        self._dims = ParallelDims()
        self._mesh: ParallelMesh | None = None  # None on one rank
        self._ranks: dist.ProcessGroup | None = None  # all of this engine; None is one
        self._writers: dist.ProcessGroup | None = None  # the same ranks, for checkpoints
        self._seed = seed
        self._version = 0
        self._folder = Path(config.path)  # of the model; for a hub name, once it is initialized
        self._hf_config: Mapping[str, Any] = {}
        self._model: ModelT | None = None
        self._adapters: LoraAdapters | None = None
        self._optimizer: OptimizerT | None = None
        self._receiver: tuple[InferenceEngine, WeightUpdateMeta] | None = None
        self._profile: torch.profiler.profile | None = None

    @abstractmethod
    def _dims_of(self, strategy: ParallelStrategy) -> ParallelDims:
        """Ranks along each axis; ValueError for a layout that cannot be."""

    @abstractmethod
    def _build_model(self, *, trains: bool) -> ModelT:
        """The model of `self._folder` with its weights, sharded; sets `self._hf_config`, with LoRA
        also `self._adapters`. `trains`: there will be an optimizer."""

    @abstractmethod
    def _build_optimizer(self, config: OptimizerConfig, total_steps: int) -> OptimizerT: ...

    @abstractmethod
    def _checkpointed(self) -> nn.Module:
        """The module whose parameters and buffers checkpoints hold."""

    @abstractmethod
    def _load_hf(self, path: str) -> None:
        """Replace the weights by those of a Hugging Face folder."""

    @abstractmethod
    def forward_backward_batch(
        self, mbs: list[MicroBatch], output_fn: OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        """`output_fn` of each micro-batch, detached; unless `forward_only` also backward of it.

        Outputs cover the whole micro-batch on every rank that shares its tokens. Gradients are
        summed (not averaged) over the ranks of `dp_group`.
        """

    def _check_replay(self) -> None:
        """ValueError unless the engine can compute by the experts that a batch names."""
        raise ValueError(
            f"{ROUTED_KEY}: {type(self).__name__} has no router replay; use backend archon, or "
            "turn rollout.return_routed_experts off"
        )

    def _read_images(self, data: dict[str, Any]) -> Any:
        """What the model needs to see the images of packed rows; None if they have none."""
        refuse_images(data.get(MULTI_MODAL_KEY), f"{type(self).__name__} trains text alone")

    def _complete_images(self, mbs: list[MicroBatch]) -> list[MicroBatch]:
        """Of a batch with images on some rank: micro-batches without get what makes a sharded
        tower run there too. All ranks call; one that is alone may not."""
        raise NotImplementedError(f"{type(self).__name__} trains text alone")

    def _weights_changed(self) -> None:
        """Called after weights were loaded or updated."""

    def _move(self, device: torch.device | str) -> None:
        """Move model and optimizer."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave its device")

    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        """Join the ranks of the layout; call it before `initialize`."""
        self._dims = self._dims_of(parallel_strategy)
        if parallel_strategy.world_size > 1:
            self.config.check_layout(parallel_strategy)
            self.device = join_ranks()
            self._ranks = dist.group.WORLD
        self._create_groups(parallel_strategy)

    def _create_groups(self, strategy: ParallelStrategy) -> None:
        """Of the ranks along each axis: a mesh of all ranks; none for a single process."""
        if self._ranks is not None:
            self._mesh = self._dims.build_mesh(self.device.type)
            self.dp_group = self._mesh.get_group("dp") if self._dims.dp > 1 else None

    @property
    def min_micro_batches(self) -> int:
        """One per pipeline stage, so that none idles."""
        return self._dims.pp

    @property
    def data_parallel_rank(self) -> int:
        return 0 if self.dp_group is None else self.dp_group.rank()

    @property
    def data_parallel_world_size(self) -> int:
        return 1 if self.dp_group is None else self.dp_group.size()

    @property
    def _is_first_rank(self) -> bool:
        return self._ranks is None or self._ranks.rank() == 0

    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model; with `config.optimizer` and `ft_spec` it can also be trained."""
        if self.device.type == "cpu":
            use_plain_blas()
            keep_freed_memory()
        self._folder = model_folder(self.config.path, weights=not self.config.init_from_scratch)
        optimizer = self.config.optimizer
        trains = optimizer is not None and ft_spec is not None
        self._model = self._build_model(trains=trains)
        self._weights_changed()
        self._writers = side_group(self._ranks)
        if optimizer is not None and ft_spec is not None:
            self._optimizer = self._build_optimizer(optimizer, ft_spec.total_train_steps)

    def destroy(self) -> None:
        """Process groups stay: other engines of this process use them too."""
        self._model = self._optimizer = self._receiver = self._adapters = None
        if self.device.type == "cuda":
            gc.collect()  # compiled and checkpointed blocks refer to themselves
            torch.cuda.empty_cache()

    @property
    def model(self) -> ModelT:
        if self._model is None:
            raise RuntimeError("the engine has no model yet: call initialize() first")
        return self._model

    @property
    def optimizer(self) -> OptimizerT:
        if self._optimizer is None:
            raise RuntimeError(
                "the engine cannot train: give its config an optimizer section and initialize() "
                "a FinetuneSpec"
            )
        return self._optimizer

    def optimizer_zero_grad(self) -> None:
        self.optimizer.forget_gradients()

    def export_stats(self) -> dict[str, float]:
        return stats_tracker.export_all(reduce_group=self.dp_group)

    def _dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        default = "bfloat16" if self.device.type == "cuda" else "float32"
        return getattr(torch, self.config.dtype or default)

    def _reduce_dtype(self) -> torch.dtype:
        """The dtype in which ranks sum gradients."""
        return getattr(torch, self.config.grad_reduce_dtype)

    def train_batch(
        self,
        input_: Mapping[str, Any],
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        rows_per_unit: int = 1,
    ) -> dict[str, float]:
        """One optimizer step on the weighted mean of the loss over the rows of all ranks."""
        _ = self.optimizer  # raises before the forward pass, not after it
        mbs = self._micro_batches(input_, rows_per_unit)
        loss = self._weighted_loss(mbs, loss_fn, loss_weight_fn, forward_only=False)
        stats = {**self.optimizer_step(), "loss": loss.item()}
        if self.shares_prefixes:
            stats["tree_token_ratio"] = self._tree_token_ratio(mbs)
        return stats

    def eval_batch(
        self,
        input_: Mapping[str, Any],
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        rows_per_unit: int = 1,
    ) -> torch.Tensor:
        """The weighted mean of the loss over the rows of all ranks."""
        mbs = self._micro_batches(input_, rows_per_unit)
        return self._weighted_loss(mbs, loss_fn, loss_weight_fn, forward_only=True)

    def forward_batch(
        self, input_: Mapping[str, Any], *, with_entropy: bool = False
    ) -> torch.Tensor:
        """Log-probabilities or values `[B, S]` of this rank's rows on their device, padding 0;
        `[B, S, 2]` with entropies."""
        assert not (with_entropy and self.config.is_critic), "values have no entropy"
        mask = input_["attention_mask"]
        mbs = self._micro_batches(input_, 1)
        shape = (*mask.shape, 2) if with_entropy else mask.shape
        out_BS = torch.zeros(shape, dtype=torch.float32, device=mask.device)

        def output_fn(index: int, output_T: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            progress()
            return torch.stack([output_T, *rest], dim=-1) if with_entropy else output_T

        packed = self.forward_backward_batch(mbs, output_fn, True)
        for mb, output_T in zip(mbs, packed, strict=True):
            if not mb.rows:
                continue
            rows_BS = unpack(output_T, mb.data["cu_seqlens"], mask.shape[1])
            out_BS[mb.rows] = rows_BS.to(mask.device)
        return out_BS

    def _micro_batches(self, input_: Mapping[str, Any], rows_per_unit: int) -> list[MicroBatch]:
        """This rank's micro-batches, as many as any other rank's."""
        if ROUTED_KEY in input_:
            self._check_replay()
        spec = replace(self.mb_spec, n_mbs=max(self.mb_spec.n_mbs, self.min_micro_batches))

        def split() -> list[MicroBatch]:
            shares = self.shares_prefixes
            return split_micro_batches(
                input_,
                spec,
                self.device,
                rows_per_unit,
                shares_prefixes=shares,
                read_images=self._read_images,
            )

        if self.dp_group is None:
            return split()
        own = split if len(input_["attention_mask"]) else list
        return fill_up(
            own,
            self.dp_group,
            self.device,
            shares_prefixes=self.shares_prefixes,
            complete_images=self._complete_images,
        )

    def _weighted_loss(
        self,
        mbs: list[MicroBatch],
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        forward_only: bool,
    ) -> torch.Tensor:
        """The sum over all ranks of each micro-batch's loss times its share of the weight."""
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        weights = torch.stack([loss_weight_fn(mb.data).to(none) if mb.rows else none for mb in mbs])
        total = self._summed(weights.sum())
        if not total > 0:
            raise ValueError(
                f"the batch of {sum(len(mb.rows) for mb in mbs)} sequences has a loss weight of "
                f"{total.item()}: there is no token to learn from; check its loss_mask"
            )
        shares = (weights / total).float()

        def output_fn(index: int, *outputs: torch.Tensor) -> torch.Tensor:
            progress()
            if not mbs[index].rows:
                return outputs[0].sum() * 0.0  # in the graph, so that backward collectives run
            return loss_fn(*outputs, mbs[index].data) * shares[index]

        losses = torch.stack(self.forward_backward_batch(mbs, output_fn, forward_only))
        return self._summed(losses.sum())

    def _tree_token_ratio(self, mbs: list[MicroBatch]) -> float:
        """Computed tokens divided by the tokens of all sequences, over all ranks."""
        trees = [mb.tree for mb in mbs if mb.tree is not None and mb.rows]
        counts = [sum(map(len, trees)), sum(len(tree.place_T) for tree in trees)]
        totals = self._summed(torch.tensor(counts, dtype=torch.float64, device=self.device))
        computed, given = totals.tolist()
        return computed / given

    def _summed(self, local: torch.Tensor) -> torch.Tensor:
        """In place, over the ranks with other rows."""
        if self.dp_group is not None:
            dist.all_reduce(local, group=self.dp_group)
        return local

    def optimizer_step(self) -> dict[str, float]:
        stats = self.optimizer.step()
        self._weights_changed()
        return stats

    def step_lr_scheduler(self) -> None:
        self.optimizer.set_lr_step(self.optimizer.lr_step + 1)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write the folder `meta.path`: atomically as `dcp`; as `hf` pass a scratch folder for
        that. With LoRA `hf` is the adapter alone, as peft saves it."""
        if meta.weight_format == "dcp":
            optimizer = self.optimizer if meta.with_optim else None
            model = self._checkpointed()
            checkpoint.save(meta.path, model, optimizer, self._version, self._writers)
            return
        _refuse_optimizer(meta)
        adapters = self._adapters
        if adapters is None:
            self._hand_over(self.hf_weights(), lambda weights: self._save_hf(weights, meta))
        else:
            trained = self._adapter_tensors(adapters)
            self._hand_over(trained, lambda tensors: self._save_adapters(adapters, tensors, meta))

    def _adapter_tensors(self, adapters: LoraAdapters) -> Weights:
        link = self._stage_link()
        return stream_adapters(adapters, is_receiver=self._is_first_rank, link=link)

    def _stage_link(self) -> StageLink | None:
        """The path of a pipeline stage's weights to the first rank; None without a pipeline."""
        return None

    def capture(self) -> Callable[[str | Path], None]:
        model = self._checkpointed()
        return checkpoint.capture(model, self.optimizer, self._version, self._writers).write

    def _save_hf(self, weights: Weights, meta: SaveLoadMeta) -> None:
        config = critic_config(self._hf_config) if self.config.is_critic else self._hf_config
        save_hf(weights, config, meta.path)
        _save_beside(meta, self._folder)

    def _save_adapters(self, adapters: LoraAdapters, tensors: Weights, meta: SaveLoadMeta) -> None:
        adapters.save(tensors, meta.path, meta.base_model_path or self.config.path)
        _save_beside(meta, self._folder)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "dcp":
            optimizer = self.optimizer if meta.with_optim else None
            model = self._checkpointed()
            self._version = checkpoint.load(meta.path, model, optimizer, self._writers)
        else:
            _refuse_optimizer(meta)
            if self._adapters is None:
                self._load_hf(meta.path)
            else:
                self._adapters.load(meta.path)
        self._weights_changed()
        if self._optimizer is not None and not meta.with_optim:
            self._optimizer.read_model()

    def _hand_over(self, weights: Weights, consume: Callable[[Weights], None]) -> None:
        """The first rank passes the weights to `consume`; an error of it is raised on all ranks."""
        if self._ranks is None:
            return consume(weights)
        failure: Exception | None = None
        if self._is_first_rank:
            try:
                consume(weights)
            except Exception as error:
                failure = error  # raised below: the other ranks still need this one's gathers
        for _ in weights:
            pass
        if any_rank(failure is not None, self._ranks, self.device):
            raise failure or RuntimeError("rank 0 could not pass the weights on: see its error")

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        self._receiver = (engine, meta)

    @property
    def connected_engine(self) -> InferenceEngine:
        return self._connected()[0]

    def _connected(self) -> tuple[InferenceEngine, WeightUpdateMeta]:
        if self._receiver is None:
            raise RuntimeError("no inference engine is connected: call connect_engine() first")
        return self._receiver

    def update_weights(self, version: int | WeightUpdateMeta) -> None:
        engine, meta = self._connected()
        number = version.version if isinstance(version, WeightUpdateMeta) else version
        sent, meta = self._sent(meta.with_version(number))
        if not meta.use_lora:
            sent = self._as_in_checkpoint(sent)
        self._hand_over(sent, lambda weights: send_weights(engine, meta, weights))

    def _as_in_checkpoint(self, weights: Weights) -> Weights:
        """By their names in the checkpoint that servers started from, if these are others."""
        return weights

    def _sent(self, meta: WeightUpdateMeta) -> tuple[Weights, WeightUpdateMeta]:
        """The tensors of an update: adapters alone where the receiver takes them."""
        if meta.use_lora and self._adapters is not None:
            return self._adapter_tensors(self._adapters), meta
        return self.hf_weights(), replace(meta, use_lora=False)

    def weight_checksums(self, dtypes: Mapping[str, str]) -> Checksums:
        """All ranks iterate; the first has the result."""
        weights = self.hf_weights() if self._receiver is None else self._sent(self._receiver[1])[0]
        return {name: checksum_as(tensor, dtypes.get(name)) for name, tensor in weights}

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    def start_profile(self) -> None:
        self._profile = torch.profiler.profile()  # of the CPU, and of the GPU if there is one
        self._profile.start()

    def save_profile(self, name: str) -> None:
        assert self._profile is not None, "start_profile() comes first"
        self._profile.stop()
        rank = 0 if self._ranks is None else self._ranks.rank()
        self._profile.export_chrome_trace(f"{name}-rank{rank}.json")
        self._profile = None

    def offload(self) -> None:
        self._move("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self.device)


def run_each(
    mbs: list[MicroBatch],
    token_outputs: Callable[[MicroBatch], tuple[torch.Tensor, ...]],
    output_fn: OutputFn,
    collect_gradients: Callable[[], None] | None,
) -> list[torch.Tensor]:
    """`output_fn` of each micro-batch, one after another, detached; unless `collect_gradients` is
    None also backward of it."""
    outputs = []
    with torch.set_grad_enabled(collect_gradients is not None):
        for index, mb in enumerate(mbs):
            output = output_fn(index, *token_outputs(mb))
            if collect_gradients is not None:
                output.backward()
                collect_gradients()
            outputs.append(output.detach())
    return outputs


def reshard(model: nn.Module) -> None:
    """A pass without backward leaves the head unsharded, hence stale after the next step."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _save_beside(meta: SaveLoadMeta, folder: Path) -> None:
    """Write the tokenizer and `_BESIDE_WEIGHTS`; the model was loaded from `folder`."""
    if meta.base_model_path is not None:
        folder = model_folder(meta.base_model_path, weights=False)
    for name in _BESIDE_WEIGHTS:
        if (folder / name).is_file():
            shutil.copy(folder / name, meta.path)
    for part in (meta.tokenizer, meta.processor):
        if part is not None:
            part.save_pretrained(meta.path)


def _refuse_optimizer(meta: SaveLoadMeta) -> None:
    if meta.with_optim:
        raise ValueError(
            "weight_format='hf' holds weights only: use weight_format='dcp' for the optimizer"
        )
