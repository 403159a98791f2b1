"""One rank and several give the same: normalisation over real processes with gloo."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from areal.algorithm.normalization import normalize

# Rows of each rank, as groups of samples; the second rank has fewer, odd ones, or none.
SPLITS = [([2, 3], [4]), ([1], [1]), ([3, 1], [])]
LEVELS = list(itertools.product(("batch", "group", None), ("batch", "group")))


def cases():
    """(options, groups per rank, x, mask) of every case, the same in every process."""
    gen = torch.Generator().manual_seed(0)
    for split, (mean, std), width in itertools.product(SPLITS, LEVELS, [None, 4]):
        rows = sum(map(sum, split))
        x = torch.randn(*([rows] if width is None else [rows, width]), generator=gen)
        for mask in (None, torch.rand(x.shape, generator=gen) < 0.6, _first_rank_only(x, split)):
            yield dict(mean_level=mean, std_level=std), split, x, mask
        if mean is not None:
            yield dict(mean_level=mean, std_level=None, mean_leave1out=True), split, x, None


def _first_rank_only(x: torch.Tensor, split) -> torch.Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[: sum(split[0])] = True
    return mask


def episodes(rows: int) -> torch.Tensor:
    """Two rows of each."""
    return torch.arange(rows) // 2


def run_rank(folder: str) -> None:
    """The rank's rows of each case."""
    rank, results = dist.get_rank(), []
    for options, split, x, mask in cases():
        start = sum(split[0]) if rank else 0
        rows = slice(start, start + sum(split[rank]))
        part = None if mask is None else mask[rows]
        group = dist.group.WORLD
        options |= dict(group_sizes=split[rank], process_group=group)
        for ids in (None, episodes(len(x))[rows]):
            results.append(normalize(x[rows], part, episode_ids=ids, **options))
    torch.save(results, f"{folder}/{rank}.pt")


def test_several_ranks_equal_one(tmp_path):
    run_ranks(2, "algorithm.test_normalization_ranks:run_rank", str(tmp_path))
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    wholes = [
        normalize(x, mask, group_sizes=[*split[0], *split[1]], episode_ids=ids, **options)
        for options, split, x, mask in cases()
        for ids in (None, episodes(len(x)))
    ]
    for whole, first, second in zip(wholes, *parts, strict=True):
        torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-6, atol=1e-7)
