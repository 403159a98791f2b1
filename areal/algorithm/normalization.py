"""Centre and scale rewards or advantages over the batch or over each prompt's group.

`normalize(x, ...)` returns (x - mean) / (std + eps) with mean and std each taken over the whole
batch, over each group, or not at all. Sums run in float64, so a group of equal rewards gives
exactly 0 and the result does not depend on how many other rows there are.

GRPO: mean group, std group. Dr.GRPO: mean group. RLOO: mean group, leave one out.
LitePPO: mean group, std batch. REINFORCE++: both batch, over advantages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
) -> torch.Tensor:
    """`x` is `[B]` or `[B, S]`; consecutive rows form groups of `group_sizes`.

    Only elements under `mask` count and only they are changed to anything but 0; with nothing
    under the mask `x` comes back as it is. Levels are "batch", "group" or None (no centring, or
    a divisor of exactly 1).
    """
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    if not bool(mask.any()):
        return x
    x64 = x.double() * mask
    out = x64
    if mean_level is not None:
        moments = _Moments(x64, mask, _slices(mean_level, group_sizes, x))
        out = x64 - moments.mean(leave_one_out=mean_leave1out, level=mean_level)
    if std_level is not None:
        moments = _Moments(x64, mask, _slices(std_level, group_sizes, x))
        out = out / (moments.std(unbiased=std_unbiased) + eps)
    return (out * mask).to(x.dtype)


def _slices(level: str, group_sizes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """For each row `[B]`, the number of the slice it is averaged in."""
    if level == "batch":
        return torch.zeros(len(x), dtype=torch.long, device=x.device)
    if level != "group":
        raise ValueError(f"a normalisation level is 'batch', 'group' or null, got {level!r}")
    sizes = torch.as_tensor(group_sizes, device=x.device)
    if int(sizes.sum()) != len(x):
        raise ValueError(f"group sizes add up to {int(sizes.sum())} rows, the batch has {len(x)}")
    return torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes)


class _Moments:
    """Sums and counts of each slice, broadcast back over the elements of `x`."""

    def __init__(self, x64: torch.Tensor, mask: torch.Tensor, slices: torch.Tensor) -> None:
        self._x64, self._mask, self._slices = x64, mask, slices
        self._count = self._total(mask.double())
        self._sum = self._total(x64)

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        per_row = values.flatten(1).sum(1) if values.ndim > 1 else values
        num_slices = int(self._slices[-1]) + 1
        totals = per_row.new_zeros(num_slices).index_add_(0, self._slices, per_row)
        return totals[self._slices].view(-1, *[1] * (values.ndim - 1))

    def mean(self, *, leave_one_out: bool, level: str) -> torch.Tensor:
        if not leave_one_out:
            return self._sum / self._count.clamp(min=1)
        others = (self._sum - self._x64) / (self._count - 1).clamp(min=1)
        # A lone sample has no others. In a group it is its own baseline (it teaches nothing);
        # in a batch there is no baseline.
        lone = self._x64 if level == "group" else torch.zeros_like(self._x64)
        return torch.where(self._count > 1, others, lone)

    def std(self, *, unbiased: bool) -> torch.Tensor:
        mean = self._sum / self._count.clamp(min=1)
        squares = self._total(((self._x64 - mean) * self._mask) ** 2)
        if not unbiased:
            return (squares / self._count.clamp(min=1)).sqrt()
        std = (squares / (self._count - 1).clamp(min=1)).sqrt()
        return torch.where(self._count > 1, std, torch.ones_like(std))
