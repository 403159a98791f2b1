"""What training engines share: micro-batches, the exact global mean, the three entry points.

An engine implements one primitive, `forward_backward_batch`, and an optimizer step. `train_batch`,
`eval_batch` and `forward_batch` are built on it here:

    padded batch [B, S] -> pack_sequences -> packed micro-batches [T] -> forward (and backward)

A loss function returns the mean over its micro-batch. Each is scaled by its share of the total
weight, so the sum is the mean over the whole batch, however it was split.

With data parallelism each rank has some rows of the batch, possibly none. The total weight is
summed over ranks. All ranks run the same number of micro-batches, since each is a collective: ranks
with fewer add fillers, one token of weight 0 that no loss function sees.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from areal.api.config.train_engine import MicroBatchSpec, TrainEngineConfig
from areal.api.engine_api import InferenceEngine, TrainEngine
from areal.api.io_struct import WeightUpdateMeta
from areal.utils import stats_tracker
from areal.utils.data import pack, sequence_lengths, unpack
from areal.utils.prefix_tree import PrefixTree, pack_trees
from areal.utils.seqpack import Bins, pack_sequences
from areal.utils.waits import progress

Part = TypeVar("Part")

# (logprobs_T, entropy_T, micro-batch) -> loss, or (values_T, micro-batch) -> loss of a critic.
LossFn = Callable[..., torch.Tensor]
LossWeightFn = Callable[[dict[str, Any]], torch.Tensor]

# (micro-batch number, *per-token model outputs) -> a tensor; a scalar when it is differentiated.
# The outputs are logprobs_T and entropy_T of a language model, values_T of a critic.
OutputFn = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch, packed. A filler has no rows and only the keys of its tokens."""

    rows: list[int]
    data: dict[str, Any]
    tree: PrefixTree | None = None  # of its sequences, if the engine shares prefixes


class BaseTrainEngine(TrainEngine):
    """Entry points of a training engine over its `forward_backward_batch` and `optimizer_step`."""

    device: torch.device
    mb_spec: MicroBatchSpec
    dp_group: dist.ProcessGroup | None  # ranks with other rows of the batch; None is one rank
    shares_prefixes: bool  # computes common prefixes of a micro-batch once
    _receiver: tuple[InferenceEngine, WeightUpdateMeta] | None  # of `connect_engine`

    @property
    def min_micro_batches(self) -> int:
        """With fewer, some pipeline stages would idle."""
        return 1

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """RuntimeError if the engine was initialized without one (`require_optimizer`)."""

    @abstractmethod
    def forward_backward_batch(
        self, mbs: list[MicroBatch], output_fn: OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        """`output_fn` of each micro-batch, detached; unless `forward_only` also backward of it.

        Outputs cover the whole micro-batch on every rank that shares its tokens. Gradients are
        summed (not averaged) over the ranks of `dp_group`.
        """

    def optimizer_zero_grad(self) -> None:
        self.optimizer.forget_gradients()

    @property
    def connected_engine(self) -> InferenceEngine:
        if self._receiver is None:
            raise RuntimeError("no inference engine is connected: call connect_engine() first")
        return self._receiver[0]

    def export_stats(self) -> dict[str, float]:
        return stats_tracker.export_all(reduce_group=self.dp_group)

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
        mbs = _micro_batches(self, input_, rows_per_unit)
        loss = _weighted_loss(self, mbs, loss_fn, loss_weight_fn, forward_only=False)
        stats = {**self.optimizer_step(), "loss": loss.item()}
        if self.shares_prefixes:
            stats["tree_token_ratio"] = _tree_token_ratio(self, mbs)
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
        mbs = _micro_batches(self, input_, rows_per_unit)
        return _weighted_loss(self, mbs, loss_fn, loss_weight_fn, forward_only=True)

    def forward_batch(self, input_: Mapping[str, Any]) -> torch.Tensor:
        """Log-probabilities or values `[B, S]` of this rank's rows on their device, padding 0."""
        mask = input_["attention_mask"]
        mbs = _micro_batches(self, input_, 1)
        out_BS = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)

        def output_fn(index: int, output_T: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            progress()
            return output_T

        packed = self.forward_backward_batch(mbs, output_fn, True)
        for mb, output_T in zip(mbs, packed, strict=True):
            if not mb.rows:
                continue
            rows_BS = unpack(output_T, mb.data["cu_seqlens"], mask.shape[1])
            out_BS[mb.rows] = rows_BS.to(mask.device)
        return out_BS


def require_model(model: Part | None) -> Part:
    if model is None:
        raise RuntimeError("the engine has no model yet: call initialize() first")
    return model


def require_optimizer(optimizer: Part | None) -> Part:
    if optimizer is None:
        raise RuntimeError(
            "the engine cannot train: give its config an optimizer section and initialize() "
            "a FinetuneSpec"
        )
    return optimizer


def compute_dtype(config: TrainEngineConfig, device: torch.device) -> torch.dtype:
    default = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, config.dtype or default)


def split_micro_batches(
    input_: Mapping[str, Any],
    spec: MicroBatchSpec,
    device: torch.device,
    rows_per_unit: int = 1,
    *,
    shares_prefixes: bool = False,
) -> list[MicroBatch]:
    """Packed micro-batches on `device` within the token budget of `spec`.

    Every `rows_per_unit` consecutive rows (a chosen and a rejected answer) are packed as one, so
    they share a micro-batch and stay neighbours in it. With `shares_prefixes` the budget counts
    the tokens of prefix trees, and each micro-batch has its tree.
    """
    lengths = sequence_lengths(input_["attention_mask"])
    if len(lengths) % rows_per_unit:
        raise ValueError(
            f"the batch has {len(lengths)} rows, which do not make units of {rows_per_unit} rows"
        )
    limits = {
        "max_tokens": spec.max_tokens_per_mb,
        "min_bins": spec.n_mbs,
        "algorithm": spec.packing_algorithm,
    }
    if not shares_prefixes:
        unit_lengths = lengths.view(-1, rows_per_unit).sum(dim=1).tolist()
        row_bins = _rows_of_units(pack_sequences(unit_lengths, **limits), rows_per_unit)
        return [MicroBatch(rows, _to_device(pack(input_, rows), device)) for rows in row_bins]
    ids = input_["input_ids"].numpy(force=True)
    sequences = [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
    bins = pack_trees(sequences, rows_per_unit=rows_per_unit, **limits)
    return [
        MicroBatch(
            rows,
            _to_device(pack(input_, rows), device),
            PrefixTree.of([sequences[row] for row in rows]),
        )
        for rows in _rows_of_units(bins, rows_per_unit)
    ]


def _rows_of_units(bins: Bins, rows_per_unit: int) -> Bins:
    return [
        [unit * rows_per_unit + row for unit in bin_ for row in range(rows_per_unit)]
        for bin_ in bins
    ]


def _micro_batches(
    engine: BaseTrainEngine, input_: Mapping[str, Any], rows_per_unit: int
) -> list[MicroBatch]:
    """This rank's micro-batches, with fillers up to the largest count of any rank."""
    device, group = engine.device, engine.dp_group
    num_mbs = max(engine.mb_spec.n_mbs, engine.min_micro_batches)
    spec = replace(engine.mb_spec, n_mbs=num_mbs)

    def split() -> list[MicroBatch]:
        return split_micro_batches(
            input_,
            spec,
            device,
            rows_per_unit,
            shares_prefixes=engine.shares_prefixes,
        )

    if group is None:
        return split()
    # Raised only after the collective below, which the other ranks are waiting in.
    refused: ValueError | None = None
    mbs: list[MicroBatch] = []
    try:
        if len(input_["attention_mask"]):
            mbs = split()
    except ValueError as error:
        refused = error
    most, any_refused = _largest([len(mbs), int(refused is not None)], group, device)
    if refused is not None:
        raise refused
    if any_refused:
        raise RuntimeError("another rank refused its part of the batch: its error says why")
    if most == 0:
        raise ValueError("the batch has no rows on any rank; give at least one")
    tree = PrefixTree.of([[0]]) if engine.shares_prefixes else None
    return mbs + [MicroBatch([], _filler(device), tree)] * (most - len(mbs))


def _filler(device: torch.device) -> dict[str, Any]:
    tokens = {"input_ids": torch.zeros(1, dtype=torch.int32)}
    bounds = {"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32), "max_seqlen": 1}
    return _to_device({**tokens, **bounds}, device)


def _largest(numbers: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    largest = torch.tensor(numbers, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _weighted_loss(
    engine: BaseTrainEngine,
    mbs: list[MicroBatch],
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    *,
    forward_only: bool,
) -> torch.Tensor:
    """The sum over all ranks of each micro-batch's loss times its share of the weight."""
    group = engine.dp_group
    none = torch.zeros((), dtype=torch.float64, device=engine.device)
    weights = torch.stack([loss_weight_fn(mb.data).to(none) if mb.rows else none for mb in mbs])
    total = _summed(weights.sum(), group)
    if not total > 0:
        raise ValueError(
            f"the batch of {sum(len(mb.rows) for mb in mbs)} sequences has a loss weight of "
            f"{total.item()}: there is no token to learn from; check its loss_mask"
        )
    shares = (weights / total).float()

    def output_fn(index: int, *outputs: torch.Tensor) -> torch.Tensor:
        progress()
        if not mbs[index].rows:
            return outputs[0].sum() * 0.0  # stays in the graph, so that backward collectives run
        return loss_fn(*outputs, mbs[index].data) * shares[index]

    losses = torch.stack(engine.forward_backward_batch(mbs, output_fn, forward_only))
    return _summed(losses.sum(), group)


def _tree_token_ratio(engine: BaseTrainEngine, mbs: list[MicroBatch]) -> float:
    """Computed tokens divided by the tokens of all sequences, over all ranks."""
    trees = [mb.tree for mb in mbs if mb.tree is not None and mb.rows]
    counts = [sum(map(len, trees)), sum(len(tree.place_T) for tree in trees)]
    totals = _summed(
        torch.tensor(counts, dtype=torch.float64, device=engine.device), engine.dp_group
    )
    computed, given = totals.tolist()
    return computed / given


def _summed(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(local, group=group)
    return local


def _to_device(data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in data.items()
    }
