"""What every training back end shares: micro-batches, the exact global mean, the three entries.

A back end gives one primitive, `forward_backward_batch`, and an optimizer step. `train_batch`,
`eval_batch` and `forward_batch` are written here once over it.

    padded batch [B, S] -> pack_sequences -> packed micro-batches [T] -> forward (and backward)

A loss function returns the mean over its micro-batch. Each is scaled by its share of the total
weight, so the sum is the mean over the whole batch and does not depend on how it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from areal.api.config.train_engine import MicroBatchSpec
from areal.utils.data import pack, sequence_lengths, unpack
from areal.utils.seqpack import pack_sequences

# (logprobs_T, entropy_T, micro-batch) -> loss, or (values_T, micro-batch) -> loss of a critic.
LossFn = Callable[..., torch.Tensor]
LossWeightFn = Callable[[dict[str, Any]], torch.Tensor]

# (micro-batch number, *what the model says of each token) -> a tensor; a scalar when it is
# differentiated. A language model says logprobs_T and entropy_T, a critic values_T.
OutputFn = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch, packed."""

    rows: list[int]
    data: dict[str, Any]


class Backend(Protocol):
    """What the functions below need of an engine."""

    device: torch.device
    mb_spec: MicroBatchSpec

    def forward_backward_batch(
        self, mbs: list[MicroBatch], output_fn: OutputFn, forward_only: bool
    ) -> list[torch.Tensor]:
        """`output_fn` of each micro-batch, detached; unless `forward_only` also backward of it."""
        ...

    def optimizer_step(self) -> dict[str, float]: ...


def train_batch(
    backend: Backend,
    input_: Mapping[str, Any],
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    rows_per_unit: int,
) -> dict[str, float]:
    """One optimizer step on the weighted mean of the loss."""
    mbs = split_micro_batches(input_, backend.mb_spec, backend.device, rows_per_unit)
    losses = _weighted_losses(backend, mbs, loss_fn, loss_weight_fn, forward_only=False)
    return {**backend.optimizer_step(), "loss": losses.sum().item()}


def eval_batch(
    backend: Backend,
    input_: Mapping[str, Any],
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    rows_per_unit: int,
) -> torch.Tensor:
    """The weighted mean of the loss."""
    mbs = split_micro_batches(input_, backend.mb_spec, backend.device, rows_per_unit)
    return _weighted_losses(backend, mbs, loss_fn, loss_weight_fn, forward_only=True).sum()


def forward_batch(backend: Backend, input_: Mapping[str, Any]) -> torch.Tensor:
    """Log-probabilities or values `[B, S]` on the input's device, zero on padding."""
    mask = input_["attention_mask"]
    mbs = split_micro_batches(input_, backend.mb_spec, backend.device)
    out_BS = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    packed = backend.forward_backward_batch(mbs, lambda _, output_T, *rest: output_T, True)
    for mb, output_T in zip(mbs, packed, strict=True):
        rows_BS = unpack(output_T, mb.data["cu_seqlens"], mask.shape[1])
        out_BS[mb.rows] = rows_BS.to(mask.device)
    return out_BS


def split_micro_batches(
    input_: Mapping[str, Any], spec: MicroBatchSpec, device: torch.device, rows_per_unit: int = 1
) -> list[MicroBatch]:
    """Packed micro-batches on `device` within the token budget of `spec`.

    Every `rows_per_unit` consecutive rows (a chosen and a rejected answer) are packed as one, so
    they share a micro-batch and stay neighbours in it.
    """
    lengths = sequence_lengths(input_["attention_mask"])
    if len(lengths) % rows_per_unit:
        raise ValueError(
            f"the batch has {len(lengths)} rows, which do not make units of {rows_per_unit} rows"
        )
    bins = pack_sequences(
        lengths.view(-1, rows_per_unit).sum(dim=1).tolist(),
        max_tokens=spec.max_tokens_per_mb,
        min_bins=spec.n_mbs,
        algorithm=spec.packing_algorithm,
    )
    row_bins = [
        [unit * rows_per_unit + row for unit in bin_ for row in range(rows_per_unit)]
        for bin_ in bins
    ]
    return [MicroBatch(rows, _to_device(pack(input_, rows), device)) for rows in row_bins]


def _weighted_losses(
    backend: Backend,
    mbs: list[MicroBatch],
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    *,
    forward_only: bool,
) -> torch.Tensor:
    """The loss of each micro-batch times its share of the weight, detached."""
    weights = torch.stack([loss_weight_fn(mb.data).double() for mb in mbs])
    total = weights.sum()
    if not total > 0:
        raise ValueError(
            f"the batch of {sum(len(mb.rows) for mb in mbs)} sequences has a loss weight of "
            f"{total.item()}: there is no token to learn from; check its loss_mask"
        )
    shares = (weights / total).float()

    def output_fn(index: int, *outputs: torch.Tensor) -> torch.Tensor:
        return loss_fn(*outputs, mbs[index].data) * shares[index]

    return torch.stack(backend.forward_backward_batch(mbs, output_fn, forward_only))


def _to_device(data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in data.items()
    }
