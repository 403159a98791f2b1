"""What the native engine builds on: a row of a product has the same bits among any other rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from areal.utils.cpu_matmul import use_plain_blas


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 50), (192, 64), (896, 128)])
def test_rows_of_a_product_do_not_depend_on_their_number(num_inputs, num_outputs):
    use_plain_blas()
    torch.manual_seed(0)
    x, weight = torch.randn(512, num_inputs), torch.randn(num_outputs, num_inputs)
    whole = F.linear(x, weight)
    for start, stop in [(0, 16), (3, 19), (16, 64), (100, 340), (0, 496)]:
        assert torch.equal(F.linear(x[start:stop].clone(), weight), whole[start:stop])
