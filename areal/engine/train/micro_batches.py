"""How is a batch cut? Packed micro-batches of a token budget, equally many on every rank.

    padded batch [B, S] -> pack_sequences -> packed micro-batches [T]

With data parallelism each rank has some rows of the batch, possibly none. All ranks run the same
number of micro-batches, since each is a collective: ranks with fewer add fillers, one token of
weight 0 that no loss function sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from areal.api.config.train_engine import MicroBatchSpec
from areal.utils.data import MULTI_MODAL_KEY, pack, sequence_lengths
from areal.utils.prefix_tree import PrefixTree, pack_trees
from areal.utils.seqpack import Bins, pack_sequences

# (micro-batch number, *per-token model outputs) -> a tensor; a scalar when it is differentiated.
# The outputs are logprobs_T and entropy_T of a language model, values_T of a critic.
OutputFn = Callable[..., torch.Tensor]
# Packed rows -> what the model needs to see their images; None without images.
ReadImages = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch, packed. A filler has no rows and only the keys of its tokens."""

    rows: list[int]
    data: dict[str, Any]
    tree: PrefixTree | None = None  # of its sequences, if the engine shares prefixes
    images: Any = None  # what the engine's `read_images` made of theirs


def split_micro_batches(
    input_: Mapping[str, Any],
    spec: MicroBatchSpec,
    device: torch.device,
    rows_per_unit: int = 1,
    *,
    shares_prefixes: bool = False,
    read_images: ReadImages | None = None,
) -> list[MicroBatch]:
    """Packed micro-batches on `device` within the token budget of `spec`.

    Every `rows_per_unit` consecutive rows (a chosen and a rejected answer) are packed as one, so
    they share a micro-batch and stay neighbours in it, as do rows that show the same images. With
    `shares_prefixes` the budget counts the tokens of prefix trees, and each micro-batch has its
    tree. `read_images` gets packed rows.
    """
    lengths = sequence_lengths(input_["attention_mask"]).tolist()
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
        units = _units(input_, lengths, rows_per_unit, spec)
        unit_lengths = [sum(lengths[row] for row in unit) for unit in units]
        bins = pack_sequences(unit_lengths, **limits)
        row_bins = [[row for unit in bin_ for row in units[unit]] for bin_ in bins]
        return [_micro_batch(input_, rows, device, read_images) for rows in row_bins]
    ids = input_["input_ids"].numpy(force=True)
    sequences = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    bins = pack_trees(sequences, rows_per_unit=rows_per_unit, **limits)
    return [
        _micro_batch(
            input_, rows, device, read_images, PrefixTree.of([sequences[row] for row in rows])
        )
        for rows in _rows_of_units(bins, rows_per_unit)
    ]


def _units(
    input_: Mapping[str, Any], lengths: list[int], rows_per_unit: int, spec: MicroBatchSpec
) -> list[list[int]]:
    """Rows that are packed as one: `rows_per_unit` each; or neighbours that show the same images,
    as many as fit into a micro-batch, since a vision tower computes these once for all of them."""
    count, shown = len(lengths), input_.get(MULTI_MODAL_KEY)
    units = [list(range(row, row + rows_per_unit)) for row in range(0, count, rows_per_unit)]
    if rows_per_unit > 1 or not shown or spec.max_tokens_per_mb is None:
        return units
    joined, pixels, room = [], None, 0
    for row, (length, images) in enumerate(zip(lengths, shown, strict=True)):
        own = images.get("pixel_values")
        if own is not None and own is pixels and length <= room:
            joined[-1].append(row)
        else:
            joined.append([row])
            room = spec.max_tokens_per_mb
        pixels, room = own, room - length
    return joined if len(joined) >= spec.n_mbs else units


def _micro_batch(
    input_: Mapping[str, Any],
    rows: list[int],
    device: torch.device,
    read_images: ReadImages | None,
    tree: PrefixTree | None = None,
) -> MicroBatch:
    data = pack(input_, rows)
    images = None if read_images is None else read_images(data)
    data.pop(MULTI_MODAL_KEY, None)
    return MicroBatch(rows, _to_device(data, device), tree, images)


def _rows_of_units(bins: Bins, rows_per_unit: int) -> Bins:
    return [
        [unit * rows_per_unit + row for unit in bin_ for row in range(rows_per_unit)]
        for bin_ in bins
    ]


def fill_up(
    split: Callable[[], list[MicroBatch]],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    shares_prefixes: bool,
    complete_images: Callable[[list[MicroBatch]], list[MicroBatch]],
) -> list[MicroBatch]:
    """What `split` returns, with fillers up to the largest count of any rank of `group`.

    If any rank has images, all call `complete_images`, as a tower may be sharded."""
    # Raised only after the collective below, which the other ranks are waiting in.
    refused: ValueError | None = None
    mbs: list[MicroBatch] = []
    try:
        mbs = split()
    except ValueError as error:
        refused = error
    counts = [len(mbs), int(refused is not None), int(any(mb.images is not None for mb in mbs))]
    most, any_refused, any_images = _largest(counts, group, device)
    if refused is not None:
        raise refused
    if any_refused:
        raise RuntimeError("another rank refused its part of the batch: its error says why")
    if most == 0:
        raise ValueError("the batch has no rows on any rank; give at least one")
    tree = PrefixTree.of([[0]]) if shares_prefixes else None
    mbs += [MicroBatch([], _filler(device), tree)] * (most - len(mbs))
    return complete_images(mbs) if any_images else mbs


def _filler(device: torch.device) -> dict[str, Any]:
    tokens = {"input_ids": torch.zeros(1, dtype=torch.int32)}
    bounds = {"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32), "max_seqlen": 1}
    return _to_device({**tokens, **bounds}, device)


def _largest(numbers: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    largest = torch.tensor(numbers, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _to_device(data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in data.items()
    }
