"""Products and quantisation of training in FP8, alone: how fast, by which way.

    python benchmark/fp8_products.py [--json FILE]

Shapes are those of Qwen2.5 1.5B (benchmark/training.py) with 16384 tokens. Of each product of a
linear layer (forward, gradient of the input, gradient of the weight): TFLOP/s in bfloat16, and in
FP8 with scales in blocks of 128, by rows and for whole tensors, factors given quantized; `exact`
sums in float32, the others as the tensor cores add by themselves, with about 14 bits. What
areal/models/common/fp8_products.py takes is `blocks`, and `tensor_exact` for gradients of weights.
Of each kernel that quantizes: TB/s read and written. Needs Hopper.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from report import Row, print_table, write_json
from torch.nn.functional import ScalingType, scaled_mm
from training import SHAPE

from areal.models.common import fp8_products, fp8_training_kernels
from areal.models.common.fp8 import FP8

TOKENS = 16384
_BLOCKS, _ROWS = ScalingType.BlockWise128x128, ScalingType.BlockWise1x128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        print(
            "benchmark/fp8_products.py needs a GPU of the Hopper kind: none was found",
            file=sys.stderr,
        )
        return 1
    dim, hidden = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    linears = {"wq": (dim, dim), "wk": (256, dim), "w1": (hidden, dim), "w2": (dim, hidden)}
    rows: list[Row] = []
    for name, (out, inner) in linears.items():
        rows += product_rows(f"{name}_forward", TOKENS, out, inner, _BLOCKS)
        rows += product_rows(f"{name}_input_grad", TOKENS, inner, out, _BLOCKS)
        rows += product_rows(f"{name}_weight_grad", out, inner, TOKENS, _ROWS)
    rows += kernel_rows(dim, hidden)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def product_rows(name: str, m: int, n: int, k: int, b_scaling: ScalingType) -> list[Row]:
    """a [m, k] times b' [k, n]."""
    a, b = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
    qa, qb = a.to(FP8), b.to(FP8)
    groups = k // 128
    ones = {"dtype": torch.float32, "device": "cuda"}
    a_scale = torch.ones(groups, m, **ones).t()
    blocks = -(-n // 128)
    room = -(-groups // 4) * 4
    b_scale = (
        torch.ones(blocks, room, **ones) if b_scaling is _BLOCKS else torch.ones(groups, n, **ones)
    ).t()
    row, column = torch.ones(m, 1, **ones), torch.ones(n, 1, **ones)
    one = torch.ones((), **ones)

    def by_rows(fast: bool) -> torch.Tensor:
        scaling = ScalingType.RowWise
        return scaled_mm(qa, qb.t(), row, scaling, column, scaling, use_fast_accum=fast)

    def by_tensor(fast: bool) -> torch.Tensor:
        scaling = ScalingType.TensorWise
        return scaled_mm(qa, qb.t(), one, scaling, one, scaling, use_fast_accum=fast)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "bf16": lambda: F.linear(a, b),
        "blocks": lambda: scaled_mm(qa, qb.t(), a_scale, _ROWS, b_scale, b_scaling),
        "rows": lambda: by_rows(True),
        "rows_exact": lambda: by_rows(False),
        "tensor": lambda: by_tensor(True),
        "tensor_exact": lambda: by_tensor(False),
    }
    flop = 2 * m * n * k
    rows = []
    for way, run in ways.items():
        try:
            seconds = device_seconds(run)
        except (RuntimeError, ValueError, NotImplementedError) as error:  # not on this device
            print(f"{name}_{way}: {str(error).splitlines()[0][:200]}")
            continue
        rows.append(Row(f"{name}_{way}", flop / seconds / 1e12, "TFLOP/s"))
    return rows


def kernel_rows(dim: int, hidden: int) -> list[Row]:
    x = torch.randn(TOKENS, dim, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn(TOKENS, hidden, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(TOKENS, 2 * hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(hidden, dim, device="cuda", dtype=torch.bfloat16)
    kernels = fp8_training_kernels
    rows = kernels.quantize(gate)
    top = rows[1].amax()
    works: dict[str, tuple[Callable[[], object], int]] = {
        "quantize": (lambda: kernels.quantize(x), 3 * x.numel()),
        "quantize_hidden": (lambda: kernels.quantize(gate), 3 * gate.numel()),
        "transpose_hidden": (lambda: kernels.transpose(*rows, top), 2 * gate.numel()),
        "gated": (lambda: kernels.quantize_gated(gate_up), 5 * gate.numel()),
        "gate_grads": (
            lambda: kernels.quantize_gate_grads(gate, gate_up),
            8 * gate.numel(),
        ),
        "weight": (
            lambda: fp8_products.quantize_weights([weight], transposed=False),
            3 * weight.numel(),
        ),
        "weight_transposed": (
            lambda: fp8_products.quantize_weights([weight], transposed=True),
            3 * weight.numel(),
        ),
        "copy": (lambda: gate.clone(), 4 * gate.numel()),
    }
    found = []
    for name, (run, num_bytes) in works.items():
        seconds = device_seconds(run)
        print(f"{name}: {1e6 * seconds:.0f} us")
        found.append(Row(name, num_bytes / seconds / 1e12, "TB/s"))
    return found


def device_seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Of one run among many in a row, so that the host's time does not count."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


if __name__ == "__main__":
    sys.exit(main())
