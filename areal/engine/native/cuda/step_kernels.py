"""Slot updates of a decode step on the device, so that steps need no host in between.

`prepare_decode` turns the slots of a step's rows into tokens, positions and cache positions;
`finish_decode` writes the sampled tokens back to their slots. The host reads the tokens of the last
K steps from a ring later.

Padding rows of a batch use the last slot, a scratch slot: it has one token, its pages are page 0,
and it never changes.

Shape legend: R rows, S slots, P pages per slot, C remembered outputs per slot, K steps of the ring.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128
_FINISH_BLOCK = 1024


def prepare_decode(
    slot_R: torch.Tensor,
    last_token_S: torch.Tensor,
    num_tokens_S: torch.Tensor,
    page_table_SP: torch.Tensor,
    page_size: int,
    tokens_R: torch.Tensor,
    positions_R: torch.Tensor,
    write_R: torch.Tensor,
) -> None:
    """`num_tokens` counts the newest token, whose key and value this step writes.

    A position past the page table is written to page 0, the scratch page: a sequence that has
    ended may run a few more steps before the host removes it.
    """
    num_rows = slot_R.shape[0]
    _prepare_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        slot_R, last_token_S, num_tokens_S, page_table_SP, tokens_R, positions_R, write_R,
        num_rows, page_table_SP.shape[1],
        PAGE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _prepare_kernel(
    slot_ptr, last_token_ptr, num_tokens_ptr, page_table_ptr, tokens_ptr, positions_ptr, write_ptr,
    num_rows, P, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slot_ptr + row, inside, 0).to(tl.int64)
    position = tl.load(num_tokens_ptr + slot, inside, 1) - 1
    page_index = position // PAGE
    page = tl.load(page_table_ptr + slot * P + page_index, inside & (page_index < P), 0)
    tl.store(tokens_ptr + row, tl.load(last_token_ptr + slot, inside, 0), inside)
    tl.store(positions_ptr + row, position, inside)
    tl.store(write_ptr + row, page.to(tl.int64) * PAGE + position % PAGE, inside)


def finish_decode(
    slot_R: torch.Tensor,
    token_R: torch.Tensor,
    logprob_R: torch.Tensor,
    last_token_S: torch.Tensor,
    num_tokens_S: torch.Tensor,
    num_output_S: torch.Tensor,
    history_SC: torch.Tensor,
    step_count: torch.Tensor,
    out_tokens_KR: torch.Tensor,
    out_logprobs_KR: torch.Tensor,
) -> None:
    """Append each row's token to its slot and to row `step_count % K` of the ring; count the step.

    The ring may be wider than R. A full history drops later tokens. A single program does it all,
    so that every row reads the count before it is advanced.
    """
    _finish_kernel[(1,)](
        slot_R, token_R, logprob_R, last_token_S, num_tokens_S, num_output_S, history_SC,
        step_count, out_tokens_KR, out_logprobs_KR,
        slot_R.shape[0], num_tokens_S.shape[0], history_SC.shape[1],
        out_tokens_KR.shape[0], out_tokens_KR.stride(0), out_logprobs_KR.stride(0),
        BLOCK=_FINISH_BLOCK,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _finish_kernel(
    slot_ptr, token_ptr, logprob_ptr, last_token_ptr, num_tokens_ptr, num_output_ptr, history_ptr,
    step_count_ptr, out_tokens_ptr, out_logprobs_ptr,
    num_rows, S, C, K, tokens_stride, logprobs_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    step = tl.load(step_count_ptr)
    ring_row = (step % K).to(tl.int64)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < num_rows
        slot = tl.load(slot_ptr + row, inside, 0).to(tl.int64)
        token = tl.load(token_ptr + row, inside, 0)
        logprob = tl.load(logprob_ptr + row, inside, 0.0)
        tl.store(out_tokens_ptr + ring_row * tokens_stride + row, token, inside)
        tl.store(out_logprobs_ptr + ring_row * logprobs_stride + row, logprob, inside)

        live = inside & (slot < S - 1)
        num_tokens = tl.load(num_tokens_ptr + slot, live, 0)
        num_output = tl.load(num_output_ptr + slot, live, 0)
        tl.store(last_token_ptr + slot, token, live)
        tl.store(history_ptr + slot * C + num_output, token, live & (num_output < C))
        tl.store(num_tokens_ptr + slot, num_tokens + 1, live)
        tl.store(num_output_ptr + slot, num_output + 1, live)
    tl.debug_barrier()  # all warps have read the count
    tl.store(step_count_ptr, step + 1)
