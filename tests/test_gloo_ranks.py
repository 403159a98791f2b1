"""The spawner of ranks: results by rank, and the failure of one told instead of a hang."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks


def total(start: int) -> list[int]:
    mine = torch.tensor(start + dist.get_rank())
    dist.all_reduce(mine)
    return [int(os.environ["RANK"]), int(mine)]


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is broken")
    dist.barrier()  # rank 0 would wait here for ever


def test_results_come_by_rank():
    assert run_ranks(2, "test_gloo_ranks:total", 10) == [[0, 21], [1, 21]]


def test_the_rank_that_failed_is_named():
    with pytest.raises(AssertionError, match=r"(?s)on rank 1:.*rank one is broken"):
        run_ranks(2, "test_gloo_ranks:fail_on_rank_1")
