"""Softmax of the LM head on the GPU: each logit is read once, in float32, and nothing is kept.

    log_total_C, label_C, mean_C = row_statistics(raw_CV, labels_C, temperature, cap)
    grad_CV = logit_gradient(raw_CV, labels_C, log_total_C, grad_C, temperature, cap, dtype)

`raw_CV` are the products with the head; logits are cap * tanh(raw / cap) / temperature (without a
cap raw / temperature). Plain torch needs eight passes over memory for the first, six for the other.

Shapes: C rows, V vocabulary.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 8


def row_statistics(
    raw_CV: torch.Tensor, labels_C: torch.Tensor, temperature: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row: logsumexp, the label's logit, and the mean of the logits under softmax."""
    num_rows, width = raw_CV.shape
    log_total_C, label_C, mean_C = raw_CV.new_empty(3, num_rows).unbind()
    if num_rows:
        _statistics_kernel[(num_rows,)](
            raw_CV, labels_C, log_total_C, label_C, mean_C, width, raw_CV.stride(0),
            1.0 / temperature, cap or 1.0, CAPPED=cap is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return log_total_C, label_C, mean_C


def logit_gradient(
    raw_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_total_C: torch.Tensor,
    grad_C: torch.Tensor,
    temperature: float,
    cap: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """d (sum of grad * log p(label)) / d raw, in `dtype`."""
    num_rows, width = raw_CV.shape
    out_CV = torch.empty(num_rows, width, dtype=dtype, device=raw_CV.device)
    if num_rows:
        _gradient_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            raw_CV, labels_C, log_total_C, grad_C.contiguous(), out_CV, width, raw_CV.stride(0),
            1.0 / temperature, cap or 1.0, CAPPED=cap is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return out_CV


@triton.jit
def _tanh(x):
    # Of the absolute value, so that exp cannot overflow.
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _logit(raw, inverse_temperature, cap, CAPPED: tl.constexpr):
    if CAPPED:
        raw = cap * _tanh(raw / cap)
    return raw * inverse_temperature


@triton.jit
def _statistics_kernel(
    raw_ptr, labels_ptr, log_total_ptr, label_ptr, mean_ptr, V, stride, inverse_temperature, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = raw_ptr + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    # Running maximum, sum and weighted sum per lane, reduced across lanes only at the end.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + column < V
        raw = tl.load(row_ptr + start + column, inside, 0.0)
        logit = _logit(raw, inverse_temperature, cap, CAPPED)
        larger = tl.maximum(largest, tl.where(inside, logit, float("-inf")))
        shrink = tl.where(larger == largest, 1.0, tl.exp(largest - larger))
        share = tl.where(inside, tl.exp(logit - larger), 0.0)
        total = total * shrink + share
        weighted = weighted * shrink + share * logit
        largest = larger
    top = tl.max(largest, 0)
    factor = tl.exp(largest - top)
    whole = tl.sum(total * factor, 0)
    mean = tl.sum(weighted * factor, 0) / whole
    label_raw = tl.load(row_ptr + tl.load(labels_ptr + row))
    tl.store(log_total_ptr + row, top + tl.log(whole))
    tl.store(mean_ptr + row, mean)
    tl.store(label_ptr + row, _logit(label_raw, inverse_temperature, cap, CAPPED))


@triton.jit
def _gradient_kernel(
    raw_ptr, labels_ptr, log_total_ptr, grad_ptr, out_ptr, V, stride, inverse_temperature, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    raw = tl.load(raw_ptr + row.to(tl.int64) * stride + column, inside, 0.0)
    scale = tl.load(grad_ptr + row) * inverse_temperature
    logit = _logit(raw, inverse_temperature, cap, CAPPED)
    prob = tl.exp(logit - tl.load(log_total_ptr + row))
    is_label = (column == tl.load(labels_ptr + row)).to(tl.float32)
    grad = (is_label - prob) * scale
    if CAPPED:
        tanh = _tanh(raw / cap)
        grad *= 1.0 - tanh * tanh
    out = out_ptr + row.to(tl.int64) * V + column
    tl.store(out, grad.to(out_ptr.dtype.element_ty), inside)
