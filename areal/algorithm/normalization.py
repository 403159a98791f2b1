"""Centre and scale rewards or advantages over the batch or over each prompt's group.

`normalize(x, ...)` returns (x - mean) / (std + eps) with mean and std each taken over the whole
batch, over each group, or not at all. Sums run in float64, so the result does not depend on the
number of other rows or of ranks that hold them: with a process group the batch spans all its ranks.

GRPO: mean group, std group. Dr.GRPO: mean group. RLOO: mean group, leave one out.
LitePPO: mean group, std batch. REINFORCE++: both batch, over advantages.

**Episodes.** An episode (one run of a workflow) may export several rows. For rewards `[B]` each
episode counts once, however many rows it has: a row weighs 1 / (rows of its episode), so the mean
is the mean over episodes of their mean reward. Leave-one-out leaves out the whole episode: the rest
does not depend on anything it did, so the baseline is unbiased whatever the rewards of its rows.
For advantages `[B, S]` a token weighs 1 / (rows of its episode): an episode of several rows has the
weight of one row of their mean length.

**No spread.** Values that differ by less than float32 rounding are equal, and equal values are
centred to exactly 0. A standard deviation below MIN_SPREAD of the value it would divide carries no
scale: equal rewards, or a single sample, in a group whose own mean was not subtracted. Then the
batch's is used, and if that is no better, none. So no result exceeds sqrt(n) / MIN_SPREAD for n
elements, or the centred value itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

ROUNDING = 4 * torch.finfo(torch.float32).eps  # relative; rewards are stored as float32
MIN_SPREAD = 0.01
_NOTHING = 1e-6  # a weight that is rounding only; one token weighs 1 / (rows of an episode)


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
    episode_ids: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`x` is `[B]` or `[B, S]`; consecutive rows form groups of `group_sizes`.

    Only elements under `mask` count; all others become 0. With an empty mask `x` is returned
    unchanged. Levels are "batch", "group" or None (no centring, or a divisor of exactly 1). Rows of
    a group with equal `episode_ids` `[B]` are one episode; without them every row is its own. All
    ranks of `process_group` call together, each with whole groups, possibly without rows.
    """
    for level in (mean_level, std_level):
        if level not in (None, "batch", "group"):
            raise ValueError(f"a normalisation level is 'batch', 'group' or null, got {level!r}")
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    x64 = x.double().masked_fill(~mask, 0.0)
    group_ids = _group_of_row(group_sizes, x)
    batch, group = _Slices(None, process_group), _Slices(group_ids)
    if not bool(batch.total(mask.double()) > 0):
        return x
    if not bool(batch.total((~x64.isfinite()).double()) == 0):
        raise ValueError("a normaliser got a value that is not finite: look at the rewards")
    episode = _Slices(number_episodes(group_ids, episode_ids))
    levels = {"batch": batch, "group": group}
    weight = mask.double()
    if x.ndim == 1:
        weight = weight / episode.total(weight).clamp(min=1)
    else:
        rows_of_B = episode.total(torch.ones(len(x), dtype=torch.float64, device=x.device))
        weight = weight / rows_of_B.view(-1, *[1] * (x.ndim - 1))
    found = {
        name: _Moments.of(x64, mask, weight, levels[name])
        for name in dict.fromkeys((mean_level, std_level, "batch"))
        if name is not None
    }
    out = x64
    if mean_level is not None:
        left_out = episode if mean_leave1out else None
        lone_is_0 = mean_level == "group"
        out = found[mean_level].centred(x64, weight, left_out, lone_is_0=lone_is_0)
    if std_level is not None:
        divisor = torch.ones_like(out)
        for name in ("batch",) if std_level == "batch" else ("batch", "group"):
            std, usable = found[name].std(out, weight, unbiased=std_unbiased)
            divisor = torch.where(usable, std + eps, divisor)
        out = out / divisor
    return out.masked_fill(~mask, 0.0).to(x.dtype)


def are_equal(x: torch.Tensor) -> bool:
    """Whether the values differ by no more than rounding."""
    x64 = x.double()
    return not len(x) or bool((x64 - x64.mean()).abs().max() <= ROUNDING * x64.abs().max())


def episode_means(x: torch.Tensor, episode_ids: torch.Tensor | None) -> torch.Tensor:
    """The mean of each episode's rows, for `x` `[B]` of one group or with ids of the batch."""
    if episode_ids is None:
        return x.double()
    episode = _numbered(episode_ids)
    totals = x.new_zeros(len(x), dtype=torch.float64).index_add(0, episode, x.double())
    counts = torch.bincount(episode)
    return totals[: len(counts)] / counts


class _Slices:
    """Sums and maxima over each slice of the rows, in a shape that broadcasts against `x`."""

    def __init__(
        self, ids: torch.Tensor | None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """`ids` `[B]` number the slices from 0; None: one slice, all rows of all ranks."""
        self.ids = ids
        self._process_group = process_group

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._reduced(values, values.flatten(1).sum(1) if values.ndim > 1 else values, "sum")

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """For non-negative values."""
        return self._reduced(
            values, values.flatten(1).amax(1) if values.ndim > 1 else values, "amax"
        )

    def _reduced(self, values: torch.Tensor, per_row: torch.Tensor, reduce: str) -> torch.Tensor:
        ids = torch.zeros(len(per_row), dtype=torch.long, device=per_row.device)
        ids = ids if self.ids is None else self.ids
        count = max(int(ids.max()) + 1 if len(ids) else 0, 1)
        out = per_row.new_zeros(count).scatter_reduce(0, ids, per_row, reduce)
        if self.ids is not None:
            return out[ids].view(-1, *[1] * (values.ndim - 1))
        if self._process_group is not None:
            op = dist.ReduceOp.SUM if reduce == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(out, op, group=self._process_group)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        return out[0]


@dataclass(frozen=True, slots=True)
class _Moments:
    """Statistics of the elements of each slice; all broadcast against `x`."""

    slices: _Slices
    count: torch.Tensor  # sum of weights: episodes, or tokens per row of an episode
    mean: torch.Tensor
    variance: torch.Tensor  # biased
    are_equal: torch.Tensor  # bool: the elements differ by rounding only

    @classmethod
    def of(
        cls, x64: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, slices: _Slices
    ) -> _Moments:
        count = slices.total(weight)
        mean = slices.total(weight * x64) / count.clamp(min=_NOTHING)
        apart = (x64 - mean).masked_fill(~mask, 0.0)
        variance = slices.total(weight * apart.square()) / count.clamp(min=_NOTHING)
        are_equal = slices.largest(apart.abs()) <= ROUNDING * slices.largest(x64.abs())
        return cls(slices, count, mean, variance, are_equal)

    def centred(
        self, x64: torch.Tensor, weight: torch.Tensor, left_out: _Slices | None, *, lone_is_0: bool
    ) -> torch.Tensor:
        """x minus the mean; with `left_out` minus the mean of all slices but the element's own."""
        if left_out is None:
            return (x64 - self.mean).masked_fill(self.are_equal, 0.0)
        own = left_out.total(weight)
        rest = self.count - own
        others = (self.count * self.mean - left_out.total(weight * x64)) / rest.clamp(min=_NOTHING)
        # A lone sample has no others. In a group it is its own baseline (no learning signal); in a
        # batch there is no baseline.
        alone = torch.zeros_like(x64) if lone_is_0 else x64
        centred = (x64 - others).masked_fill(self.are_equal, 0.0)
        return torch.where(rest > _NOTHING, centred, alone)

    def std(
        self, centred: torch.Tensor, weight: torch.Tensor, *, unbiased: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The standard deviation, and whether it is large enough to divide `centred` by."""
        several = self.count > 1.5
        scale = self.count / (self.count - 1).clamp(min=1) if unbiased else 1.0
        std = (self.variance * scale).sqrt()
        squares = self.slices.total(weight * centred.square())
        size = (squares / self.count.clamp(min=_NOTHING)).sqrt()
        return std, several & ~self.are_equal & (std > MIN_SPREAD * size)


def _group_of_row(group_sizes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    sizes = torch.as_tensor(group_sizes, dtype=torch.long, device=x.device)
    if int(sizes.sum()) != len(x):
        raise ValueError(f"group sizes add up to {int(sizes.sum())} rows, the batch has {len(x)}")
    return torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes)


def number_episodes(group_ids: torch.Tensor, episode_ids: torch.Tensor | None) -> torch.Tensor:
    """Episodes numbered over the batch, by group and then by id; the same id in two groups is two
    episodes."""
    if episode_ids is None or not len(group_ids):
        return torch.arange(len(group_ids), device=group_ids.device)
    if episode_ids.shape != group_ids.shape:
        raise ValueError(
            f"episode_ids must be one number for each of the {len(group_ids)} rows, got shape "
            f"{list(episode_ids.shape)}"
        )
    # Not unique(dim=0) of pairs, which compares slices one by one: 4 ms for 512 rows.
    return _numbered(_numbered(group_ids) * len(group_ids) + _numbered(episode_ids))


def _numbered(ids: torch.Tensor) -> torch.Tensor:
    """The rank of each element among the distinct ones in order."""
    return cast("torch.Tensor", ids.unique(return_inverse=True)[1])  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
