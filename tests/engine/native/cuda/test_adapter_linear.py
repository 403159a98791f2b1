"""What adapters add to a projection, against one product after another in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from areal.engine.native.cuda.adapter_linear import AdapterRows, AdapterStack


@pytest.mark.parametrize(
    ("dim", "outputs", "rank", "num_rows"),
    [
        (48, (40,), 16, 5),  # one part, less than a tile
        (160, (130, 24, 24), 16, 40),  # three parts, of which one has a tail
        (2100, (64, 64), 32, 20),  # D in pieces
        (1100, (40,), 16, 4100),  # so many rows that D is not cut
    ],
)
def test_each_row_gets_the_product_of_its_adapter(dim, outputs, rank, num_rows, dtype, device):
    rows, x_TD, out_TN, expected = adapted_rows(dim, outputs, rank, num_rows, dtype, device)
    rows.add(7, x_TD, out_TN)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(out_TN.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("dim", "width", "num_rows"), [(48, 40, 5), (600, 130, 40), (40, 24, 4100)]
)
def test_gates_and_ups_are_changed_before_they_meet(
    dim, width, num_rows, activation, dtype, device
):
    work = adapted_rows(dim, (width, width), 16, num_rows, dtype, device)
    rows, x_TD, gate_up_T2F, expected = work
    out_TF = rows.add_and_gate(7, x_TD, gate_up_T2F, activation)
    gate, up = expected.chunk(2, dim=1)
    activate = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        out_TF.double(), activate(gate) * up, rtol=tolerance, atol=2 * tolerance
    )


def adapted_rows(dim, outputs, rank, num_rows, dtype, device):
    """Rows with adapters at projection 7, x, outputs before them, and after them (float64)."""
    generator = torch.Generator().manual_seed(dim)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weights, num_adapters = [new(width, dim) for width in outputs], 4
    stack = AdapterStack.zeros(num_adapters, rank, weights)
    x_TD, out_TN = new(num_rows, dim), new(num_rows, sum(outputs))
    expected = out_TN.double()
    adapter_T = torch.randint(num_adapters, (num_rows,), generator=generator).int().to(device)
    for adapter in range(1, num_adapters):  # 0 changes nothing
        start = 0
        for part, width in enumerate(outputs):
            own_rank, scale = (rank, rank - 5, 1)[adapter - 1], 0.25 * adapter
            a_RD, b_NR = new(own_rank, dim) / dim**0.5, new(width, own_rank)
            if (adapter + part) % 3:  # not every adapter changes every layer
                stack.write(adapter, part, a_RD, b_NR, scale)
                low = x_TD.double() @ a_RD.double().T @ b_NR.double().T * scale
                rows = adapter_T == adapter
                expected[rows, start : start + width] += low[rows]
            start += width
    return AdapterRows.of(adapter_T, num_adapters, {7: stack}), x_TD, out_TN, expected


def test_a_smaller_rank_over_a_larger_one_leaves_nothing(device):
    weights = [torch.zeros(8, 16, device=device)]
    stack = AdapterStack.zeros(2, 16, weights)
    ones = torch.ones
    stack.write(1, 0, ones(16, 16), ones(8, 16), 1.0)
    stack.write(1, 0, ones(2, 16), ones(8, 2), 1.0)
    out = torch.zeros(3, 8, device=device)
    place = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    rows = AdapterRows.of(place, 2, {0: stack})
    rows.add(0, ones(3, 16, device=device), out)
    rows.add(1, ones(3, 16, device=device), out)  # a projection that no adapter changes
    assert out.tolist() == [[0.0] * 8, [32.0] * 8, [32.0] * 8]
