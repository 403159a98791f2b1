"""Centre and scale rewards or advantages over the batch or over each prompt's group.

`normalize(x, ...)` returns (x - mean) / (std + eps) with mean and std each taken over the whole
batch, over each group, or not at all. Sums run in float64, so a group of equal rewards gives
exactly 0 and the result does not depend on how many other rows there are, nor on how many ranks
hold them: with a process group the batch is that of all its ranks.

GRPO: mean group, std group. Dr.GRPO: mean group. RLOO: mean group, leave one out.
LitePPO: mean group, std batch. REINFORCE++: both batch, over advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

# Sums values of the shape of `x` over each slice, in a shape that broadcasts against `x`.
Totals = Callable[[torch.Tensor], torch.Tensor]


def normalize(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    group_sizes: Sequence[int],
    mean_level: str | None,
    std_level: str | None,
    mean_leave1out: bool = False,
    std_unbiased: bool = True,
    eps: float = 1e-5,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`x` is `[B]` or `[B, S]`; consecutive rows form groups of `group_sizes`.

    Only elements under `mask` count and only they are changed to anything but 0; with nothing
    under the mask `x` comes back as it is. Levels are "batch", "group" or None (no centring, or
    a divisor of exactly 1). All ranks of `process_group` call together, each with whole groups,
    perhaps with no row at all.
    """
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    whole = _batch_totals(process_group)
    if not bool(whole(mask.double()) > 0):
        return x
    totals = {None: whole, "batch": whole, "group": _group_totals(group_sizes, x)}
    for level in (mean_level, std_level):
        if level not in totals:
            raise ValueError(f"a normalisation level is 'batch', 'group' or null, got {level!r}")
    x64 = x.double().masked_fill(~mask, 0.0)
    out = x64
    if mean_level is not None:
        out = x64 - _mean(x64, mask, totals[mean_level], mean_leave1out, mean_level)
    if std_level is not None:
        out = out / (_std(x64, mask, totals[std_level], std_unbiased) + eps)
    return out.masked_fill(~mask, 0.0).to(x.dtype)


def _batch_totals(process_group: dist.ProcessGroup | None) -> Totals:
    def total(values: torch.Tensor) -> torch.Tensor:
        out = values.sum()
        if process_group is not None:
            dist.all_reduce(out, group=process_group)
        return out

    return total


def _group_totals(group_sizes: Sequence[int], x: torch.Tensor) -> Totals:
    sizes = torch.as_tensor(group_sizes, dtype=torch.long, device=x.device)
    if int(sizes.sum()) != len(x):
        raise ValueError(f"group sizes add up to {int(sizes.sum())} rows, the batch has {len(x)}")
    group_of_row = torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes)

    def total(values: torch.Tensor) -> torch.Tensor:
        per_row = values.flatten(1).sum(1) if values.ndim > 1 else values
        sums = per_row.new_zeros(len(sizes)).index_add_(0, group_of_row, per_row)
        return sums[group_of_row].view(-1, *[1] * (values.ndim - 1))

    return total


def _mean(
    x64: torch.Tensor, mask: torch.Tensor, total: Totals, leave_one_out: bool, level: str
) -> torch.Tensor:
    count, summed = total(mask.double()), total(x64)
    if not leave_one_out:
        return summed / count.clamp(min=1)
    others = (summed - x64) / (count - 1).clamp(min=1)
    # A lone sample has no others. In a group it is its own baseline (it teaches nothing);
    # in a batch there is no baseline.
    lone = x64 if level == "group" else torch.zeros_like(x64)
    return torch.where(count > 1, others, lone)


def _std(x64: torch.Tensor, mask: torch.Tensor, total: Totals, unbiased: bool) -> torch.Tensor:
    count = total(mask.double())
    mean = total(x64) / count.clamp(min=1)
    squares = total((x64 - mean).masked_fill(~mask, 0.0).square())
    if not unbiased:
        return (squares / count.clamp(min=1)).sqrt()
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return torch.where(count > 1, std, torch.ones_like(std))
