"""Draw one token per row on the device, and its log-probability, without the host.

The meaning is that of `areal/engine/native/sampler.py`: softmax(logits / temperature) with stop
tokens banned before `min_output` tokens, cut to `top_k`, then to `top_p`, renormalised; greedy rows
take the most likely token and its log-probability under the uncut distribution. The arithmetic is
float32, good to 1e-5 in a log-probability. A seed fixes the draw here too, whatever else is in the
batch, but it is another draw from the same distribution than the CPU sampler's: the hash is taken
per token, so that parts of the vocabulary need not know of each other.

Shapes: R rows, S slots, V vocabulary, W parts of the vocabulary, M = MAX_STOP_IDS, C history.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from areal.engine.native.cuda.launch import OVERLAP
from areal.engine.native.cuda.sampling_kernels import cut_kernel, finish_kernel, race_kernel
from areal.engine.native.sampler import MAX_STOP_IDS


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """How each slot samples."""

    temperature_S: torch.Tensor  # float32, above 0
    top_k_S: torch.Tensor  # int32, at least 1; V or more: no cut
    top_p_S: torch.Tensor  # float32 in (0, 1]
    greedy_S: torch.Tensor  # int32, 0 or 1
    seed_S: torch.Tensor  # int64
    num_output_S: torch.Tensor  # int32, tokens drawn before: the index of this draw
    min_output_S: torch.Tensor  # int32, stop tokens are banned before this many
    frequency_penalty_S: torch.Tensor  # float32
    stop_ids_SM: torch.Tensor  # int32, padded with -1
    history_SC: torch.Tensor  # int32, tokens drawn; read where there is a penalty


@dataclass(frozen=True, slots=True)
class SamplingTiles:
    """How the vocabulary is laid out over programs.

    The same for every number of rows, so that a row's log-probability has the same bits in every
    batch: a part is `block` tokens, and a single row still has dozens of them.
    """

    block: int = 4096
    num_warps: int = 8
    cut_block: int = 2048
    cut_warps: int = 16
    cut_stages: int = 3


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """What the kernels of one draw leave for each other."""

    tiles: SamplingTiles
    threshold_R: torch.Tensor  # float32
    last_R: torch.Tensor  # int32
    highest_RW: torch.Tensor  # float32
    sum_RW: torch.Tensor  # float32
    token_RW: torch.Tensor  # int32

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        tiles: SamplingTiles = SamplingTiles(),  # noqa: B008 (frozen)
    ) -> SamplingWorkspace:
        num_splits = -(-vocab_size // tiles.block)
        empty = torch.empty
        return cls(
            tiles=tiles,
            threshold_R=empty(num_rows, dtype=torch.float32, device=device),
            last_R=empty(num_rows, dtype=torch.int32, device=device),
            highest_RW=empty(num_rows, num_splits, dtype=torch.float32, device=device),
            sum_RW=empty(num_rows, num_splits, dtype=torch.float32, device=device),
            token_RW=empty(num_rows, num_splits, dtype=torch.int32, device=device),
        )


def sample_rows(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    options: DeviceSampling,
    token_R: torch.Tensor,
    logprob_R: torch.Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Fills `token_R` (int32) and `logprob_R` (float32); row r samples as slot `slot_R[r]` does.

    The float32 logits are changed in place where a penalty or a ban applies.
    """
    assert logits_RV.dtype == torch.float32  # penalties add up in place: bfloat16 would lose them
    (num_rows, vocab_size), row_stride = logits_RV.shape, logits_RV.stride(0)
    num_splits, tiles = workspace.highest_RW.shape[1], workspace.tiles
    cut_kernel[(num_rows,)](
        logits_RV, row_stride, slot_R, options.temperature_S, options.top_k_S, options.top_p_S,
        options.greedy_S, options.num_output_S, options.min_output_S, options.frequency_penalty_S,
        options.stop_ids_SM, options.history_SC, options.history_SC.shape[1],
        workspace.threshold_R, workspace.last_R, vocab_size, MAX_STOP_IDS=MAX_STOP_IDS,
        BLOCK=tiles.cut_block, STAGES=tiles.cut_stages, OVERLAP=OVERLAP,
        num_warps=tiles.cut_warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    race_kernel[(num_splits, num_rows)](
        logits_RV, row_stride, slot_R, options.temperature_S, options.greedy_S, options.seed_S,
        options.num_output_S, workspace.threshold_R, workspace.last_R, workspace.highest_RW,
        workspace.sum_RW, workspace.token_RW, vocab_size, num_splits,
        BLOCK=tiles.block, OVERLAP=OVERLAP, num_warps=tiles.num_warps, launch_pdl=OVERLAP,
    )  # fmt: skip
    finish_kernel[(num_rows,)](
        logits_RV, row_stride, slot_R, options.temperature_S, options.greedy_S, options.seed_S,
        options.num_output_S, workspace.highest_RW, workspace.sum_RW, workspace.token_RW, token_R,
        logprob_R, vocab_size, num_splits, SPLITS=triton.next_power_of_2(num_splits),
        OVERLAP=OVERLAP, num_warps=1, launch_pdl=OVERLAP,
    )  # fmt: skip
