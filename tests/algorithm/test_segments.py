"""Reductions over packed sequences."""

from __future__ import annotations

import torch

from areal.algorithm.segments import (
    sequence_count,
    sequence_max,
    sequence_mean,
    sequence_sum,
    spread,
)

CU = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
MASK = torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool)  # the last sequence has no token
X = torch.tensor([-1.0, float("nan"), -4.0, 2.0, float("inf"), 7.0])


def test_each_reduction_by_hand():
    assert sequence_sum(X, MASK, CU).tolist() == [-5, 2, 0]
    assert sequence_count(MASK, CU).tolist() == [2, 1, 0]
    assert sequence_mean(X, MASK, CU).tolist() == [-2.5, 2, 0]
    assert sequence_max(X, MASK, CU).tolist() == [-1, 2, 0]
    assert spread(torch.tensor([1.0, 2.0, 3.0]), CU).tolist() == [1, 1, 1, 2, 3, 3]


def test_junk_off_the_mask_has_no_gradient():
    x = X.clone().requires_grad_()
    sequence_mean(x, MASK, CU).sum().backward()
    assert x.grad.tolist() == [0.5, 0, 0.5, 1, 0, 0]
