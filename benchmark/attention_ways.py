"""The ways to compute causal attention of packed sequences, side by side: TFLOP/s each.

Used by training.py (`--rows attention`). Twelve query and two key-value heads of 128, bfloat16. The
first call with a shape is also timed where a library plans for each shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from report import Row
from torch.nn.attention import SDPBackend, sdpa_kernel

from areal.models.common.attention import AttentionSpec, PackedAttention

_HEADS, _KV_HEADS, _DIM = 12, 2, 128
_MIXED = (9000, 5200, 3100, 2800, 2100, 1900, 1500, 1300, 1100, 900, 800, 700, 600, 500, 400, 300)

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention_rows(*, tiny: bool) -> list[Row]:
    shrink = 64 if tiny else 1
    rows: list[Row] = []
    for name, lengths in {
        "8x2048": (2048,) * 8,
        "1x32768": (32768,),
        "mixed": _MIXED,
    }.items():
        lengths = tuple(length // shrink for length in lengths)
        for way_name, way in _ways(lengths).items():
            rows += _measure(f"attention_{name}_{way_name}", way, lengths)
    if torch.cuda.is_available():
        rows.append(Row("cudnn_new_shape", _new_shape_ms(), "ms, forward and backward"))
    return rows


def _ways(lengths: tuple[int, ...]) -> dict[str, Way]:
    bounds = F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0), (1, 0)).int().to(_device())
    packed, spec = PackedAttention(bounds, max(lengths)), AttentionSpec(0)
    ways: dict[str, Way] = {"ours": lambda q, k, v: packed(spec, q, k, v)}
    if not torch.cuda.is_available():
        return ways
    ways["varlen"] = lambda q, k, v: packed._by_packed_kernel(spec, q, k, v)
    ways["cudnn_varlen"] = lambda q, k, v: _CudnnVarlen.apply(q, k, v, bounds, max(lengths))
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        ways["cudnn_gqa"] = lambda q, k, v: _rectangle(q, k, v, shape, SDPBackend.CUDNN_ATTENTION)
        ways["cudnn_repeated"] = lambda q, k, v: _rectangle(
            q, *(x.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for x in (k, v)), shape,
            SDPBackend.CUDNN_ATTENTION,
        )  # fmt: skip
        ways["flash"] = lambda q, k, v: _rectangle(q, k, v, shape, SDPBackend.FLASH_ATTENTION)
    else:
        ways["cudnn_each"] = lambda q, k, v: torch.cat(
            [
                _rectangle(*parts, (1, len(parts[0])), SDPBackend.CUDNN_ATTENTION)
                for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
            ]
        )
        ways["cudnn_padded"] = lambda q, k, v: _padded(packed, q, k, v)
    return ways


def _padded(packed: PackedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Rectangles of similar lengths, each by cuDNN."""
    rectangles, slot_T = packed._rectangles
    outputs = [
        _rectangle(*(x.index_select(0, t) for x in (q, k, v)), shape, SDPBackend.CUDNN_ATTENTION)
        for t, shape in rectangles
    ]
    return torch.cat(outputs).index_select(0, slot_T)


def _rectangle(q, k, v, shape: tuple[int, int], backend: SDPBackend) -> torch.Tensor:
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).flatten(0, 1)


class _CudnnVarlen(torch.autograd.Function):
    """cuDNN's own kernel for packed sequences, by the operators torch does not document."""

    @staticmethod
    def forward(ctx, q, k, v, bounds, longest):
        out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, bounds, bounds, longest, longest, True, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, bounds)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, seed, offset, bounds = ctx.saved_tensors
        grads = torch.ops.aten._cudnn_attention_backward(
            grad.contiguous(), q, k, v, out, lse, seed, offset, None, bounds, bounds,
            ctx.longest, ctx.longest, 0.0, True,
        )  # fmt: skip
        return *grads, None, None


def _measure(name: str, way: Way, lengths: tuple[int, ...]) -> list[Row]:
    """A way this torch cannot go is a line of its own, not the end of the benchmark."""
    flop = 2 * _HEADS * _DIM * sum(length**2 for length in lengths)
    try:
        q, k, v = _inputs(sum(lengths))
        error = _error(way(q, k, v), q, k, v, lengths)
        forward = _seconds(lambda: way(q, k, v))
        grad = torch.randn_like(q)

        def both() -> None:
            torch.autograd.grad(way(q, k, v), (q, k, v), grad)

        both_s = _seconds(both)
    except Exception as failure:
        print(f"{name}: {type(failure).__name__}: {str(failure).splitlines()[0][:150]}")
        return []
    print(f"{name}: relative error {error:.1e}")
    return [
        Row(name, flop / forward / 1e12, "TFLOP/s forward"),
        Row(f"{name}_both", 3.5 * flop / both_s / 1e12, "TFLOP/s forward + backward"),
    ]


def _inputs(num_tokens: int) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return [
        torch.randn(num_tokens, n, _DIM, dtype=dtype, device=_device(), requires_grad=True)
        for n in (_HEADS, _KV_HEADS, _KV_HEADS)
    ]


@torch.no_grad()
def _error(out: torch.Tensor, q, k, v, lengths: tuple[int, ...]) -> float:
    """Of the last sequence's last rows, against float32 written out."""
    start, rows = sum(lengths[:-1]), min(16, lengths[-1])
    q, k, v = q[-rows:].float(), k[start:].float(), v[start:].float()
    k, v = (x.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("tnh,snh->nts", q, k) * _DIM**-0.5
    hidden = torch.ones(rows, len(k), dtype=torch.bool, device=q.device).triu(len(k) - rows + 1)
    expected = torch.einsum("nts,snh->tnh", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return ((out[-rows:].float() - expected).norm() / expected.norm()).item()


def _new_shape_ms() -> float:
    """What the first call with a length costs, above the second."""
    times = []
    for length in (3333, 3335, 3337):
        for _ in range(2):
            q, k, v = _inputs(length)
            torch.cuda.synchronize()
            start = time.perf_counter()
            out = _rectangle(q, k, v, (1, length), SDPBackend.CUDNN_ATTENTION)
            out.sum().backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return (
        1e3
        * sorted(first - second for first, second in zip(times[::2], times[1::2], strict=True))[1]
    )


def _seconds(run: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
