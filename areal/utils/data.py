"""Batches of token sequences in two layouts, padded and packed, and conversion between them.

Padded: a dict whose tensors are `[B, S]` (one value per token) or `[B]` (one per sequence),
right-padded, with a bool `attention_mask`. Trajectories are exchanged in this layout.

Packed: the same dict with every `[B, S]` tensor flattened to its real tokens `[T]`, plus
`cu_seqlens` (start of each sequence) and `max_seqlen`. Models run on this layout.

Order is preserved: row i of the input is sequence i of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal.api.image_references import MULTI_MODAL_KEY


def concat_padded_tensors(
    batches: Sequence[Mapping[str, Any]], pad_value: float = 0.0
) -> dict[str, Any]:
    """One batch of all rows, each dimension padded on the right to its largest extent.

    `attention_mask` is padded with False, everything else with `pad_value`. Lists are joined; other
    values are taken from the first batch. All batches need the same keys, except that images may be
    missing in some.
    """
    if not batches:
        return {}
    if any(MULTI_MODAL_KEY in batch for batch in batches):
        batches = [_with_image_rows(batch) for batch in batches]
    first = batches[0]
    for i, batch in enumerate(batches):
        if batch.keys() != first.keys():
            odd = sorted(batch.keys() ^ first.keys())
            raise ValueError(
                f"batch {i} and batch 0 differ in the keys {odd}; give all the same keys"
            )
    if len(batches) == 1:
        return dict(first)
    return {
        key: _concat_values(
            key, [batch[key] for batch in batches], 0 if key == "attention_mask" else pad_value
        )
        for key in first
    }


def _with_image_rows(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if MULTI_MODAL_KEY in batch:
        return batch
    return {**batch, MULTI_MODAL_KEY: [{} for _ in range(len(batch["attention_mask"]))]}


def _concat_values(key: str, values: list[Any], pad_value: float) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    if len({value.shape[1:] for value in values}) == 1:
        return torch.cat(values)
    if len({value.ndim for value in values}) > 1:
        raise ValueError(f"{key}: shapes {[tuple(v.shape) for v in values]} differ in rank")
    extents = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    out = values[0].new_full((sum(map(len, values)), *extents), pad_value)
    # On the CPU the many small copies go through numpy, at a tenth of torch's cost each.
    views = [out, *values]
    if out.device.type == "cpu" and out.dtype is not torch.bfloat16:
        views = [view.numpy(force=True) for view in views]
    target, *sources = views
    start = 0
    for source in sources:
        end = start + len(source)
        target[(slice(start, end), *(slice(size) for size in source.shape[1:]))] = source
        start = end
    return out


@dataclass(frozen=True, slots=True)
class TrajBatchMeta:
    """How to split a concatenated batch into its trajectories."""

    traj_group_sizes: list[int]  # rows of each trajectory
    traj_seqlens: list[int]  # padded width of each trajectory


def concat_batch(trajs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], TrajBatchMeta]:
    """All trajectories (one per prompt group) as one padded batch; `split_batch` undoes it."""
    if not trajs:
        raise ValueError("an empty list of trajectories makes no batch; give at least one")
    shapes = [traj["attention_mask"].shape for traj in trajs]
    meta = TrajBatchMeta([shape[0] for shape in shapes], [shape[1] for shape in shapes])
    return concat_padded_tensors(trajs), meta


def split_batch(batch: Mapping[str, Any], meta: TrajBatchMeta) -> list[dict[str, Any]]:
    """The trajectories of `concat_batch`, cut back to their own rows and widths."""
    n_rows, width = batch["attention_mask"].shape
    trajs: list[dict[str, Any]] = []
    start = 0
    for size, seqlen in zip(meta.traj_group_sizes, meta.traj_seqlens, strict=True):
        rows = slice(start, start + size)
        traj = {}
        for key, value in batch.items():
            if _is_per_token(value, n_rows, width):
                traj[key] = value[rows, :seqlen]
            elif isinstance(value, list) or _is_per_row(value, n_rows):
                traj[key] = value[rows]
            else:
                traj[key] = value
        trajs.append(traj)
        start += size
    if start != n_rows:
        raise ValueError(f"group sizes add up to {start} rows, the batch has {n_rows}")
    return trajs


def select_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The batch of just these rows, in this order, with the width unchanged."""
    n_rows = len(batch["attention_mask"])
    index = torch.as_tensor(rows, dtype=torch.long, device=batch["attention_mask"].device)
    out = {}
    for key, value in batch.items():
        if _is_per_row(value, n_rows):
            out[key] = value.index_select(0, index)
        else:
            out[key] = [value[i] for i in rows] if isinstance(value, list) else value
    return out


def sequence_lengths(attention_mask: torch.Tensor) -> torch.Tensor:
    """Tokens of each row `[B]`; rejects a mask that is not right-padded or has an empty row."""
    seqlens = attention_mask.sum(dim=1)
    width = attention_mask.shape[1]
    prefix = torch.arange(width, device=attention_mask.device) < seqlens[:, None]
    if not torch.equal(prefix, attention_mask.bool()):
        raise ValueError("attention_mask must be True on a prefix of each row (right padding)")
    if not bool((seqlens > 0).all()):
        row = int((seqlens == 0).nonzero()[0])
        raise ValueError(f"row {row} of the batch has no tokens; every sequence needs at least one")
    return seqlens


def pack(batch: Mapping[str, Any], rows: Sequence[int] | None = None) -> dict[str, Any]:
    """The packed layout of `rows` (all when None) of a padded batch."""
    if rows is not None:
        batch = select_rows(batch, rows)
    mask = batch["attention_mask"]
    n_rows, width = mask.shape
    seqlens = sequence_lengths(mask)
    real = mask.bool().reshape(-1).nonzero().squeeze(1)  # flat indices of the real tokens
    packed = {
        key: value.reshape(n_rows * width, *value.shape[2:]).index_select(0, real)
        if _is_per_token(value, n_rows, width)
        else value
        for key, value in batch.items()
        if key != "attention_mask"
    }
    cu_seqlens = torch.zeros(n_rows + 1, dtype=torch.int32, device=mask.device)
    cu_seqlens[1:] = seqlens.cumsum(0)
    packed["cu_seqlens"] = cu_seqlens
    packed["max_seqlen"] = int(seqlens.max())
    return packed


def unpack(values_T: torch.Tensor, cu_seqlens: torch.Tensor, width: int) -> torch.Tensor:
    """Packed values `[T, ...]` back as `[B, width, ...]`, zero on padding."""
    seqlens = cu_seqlens.diff()
    mask = torch.arange(width, device=values_T.device) < seqlens[:, None]
    out = values_T.new_zeros((*mask.shape, *values_T.shape[1:]))
    out[mask] = values_T
    return out


def sequence_ids(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """For each packed token `[T]`, the index of its sequence."""
    return torch.repeat_interleave(
        torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device), cu_seqlens.diff()
    )


def _is_per_row(value: Any, n_rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 1 and value.shape[0] == n_rows


def _is_per_token(value: Any, n_rows: int, width: int) -> bool:
    return _is_per_row(value, n_rows) and value.ndim >= 2 and value.shape[1] == width
