"""States of recurrent layers on the device: those of slots in a decode step, of chunks in prefill.

`DeviceStates` holds them by number (state_cache.py), and one more, scratch, for padding rows of a
step. Both of its methods return a `Recur`: what a layer calls with its projections, from the token
before to the token after, in order on the stream.

A decode step reads which state a slot has from the device, so that it can be captured. A prefill
computes chunks of up to 64 tokens (models/common/delta_kernels.py), which also end where a mark is
made. Their products are of the model's dtype: unlike on the CPU, a state depends on where the
tokens before it were cut, as far as rounding goes.

Shape legend: as in state_cache.py; Y columns of all projections of a layer, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from areal.engine.native.cuda.hybrid_kernels import (
    DeltaGates,
    SlotStates,
    convolve_step,
    gated_norm,
    recur_step,
)
from areal.engine.native.state_cache import StateCache
from areal.models.common.delta_kernels import Chunks, carry, mix, read, solve
from areal.models.common.delta_rule import CHUNK

if TYPE_CHECKING:
    from areal.engine.native.cuda.slots import SlotRows
    from areal.engine.native.kv_cache import StateSpan
    from areal.models.common.args import DeltaArgs
    from areal.models.common.decoder import Decoder


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Of one layer; the convolution's are [X, W]."""

    layer: int
    kernel_XW: torch.Tensor
    gates: DeltaGates


# recur(weights, projected_TY) -> [T, N * V] after the gated norm. The columns: queries, keys and
# values [X], the gate [N * V], beta [N], decay [N].
Recur = Callable[[DeltaWeights, torch.Tensor], torch.Tensor]
Upload = Callable[[np.ndarray], torch.Tensor]


class DeviceStates:
    def __init__(self, model: Decoder, num_states: int) -> None:
        self.scratch = num_states
        self._cache = StateCache(model, num_states + 1)
        self._sizes = model.args.delta_args

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._cache.copy(source, target)

    def step(self, slot_R: torch.Tensor, slots: SlotRows, page_size: int) -> Recur:
        """One token of each of the slots `slot_R`."""
        states = SlotStates(slot_R, slots.state_S, slots.mark_S, slots.num_tokens_S, page_size)

        def recur(weights: DeltaWeights, projected_RY: torch.Tensor) -> torch.Tensor:
            rows, matrices = self._of(weights.layer)
            mixed_RX = convolve_step(projected_RY, weights.kernel_XW, rows, states, self._sizes)
            return recur_step(
                mixed_RX, projected_RY, weights.gates, matrices, states, self._sizes
            )  # fmt: skip

        return recur

    def prefill(self, lengths: np.ndarray, spans: list[StateSpan], upload: Upload) -> Recur:
        """Consecutive tokens of some sequences, one sequence after the other."""
        sizes = self._sizes
        spread = _Spread.of(lengths, spans, sizes.conv_size - 1, upload)

        def recur(weights: DeltaWeights, projected_TY: torch.Tensor) -> torch.Tensor:
            rows, matrices = self._of(weights.layer)
            qkv_TX, gate_TX, beta_TN, time_TN = _split(projected_TY, sizes)
            before = (rows, spread.read_C, spread.sequence_T)
            mixed_TX = mix(qkv_TX, weights.kernel_XW, sizes, spread.position_T, before)
            spread.keep_rows(rows, qkv_TX)
            gates, beta_TN = weights.gates, torch.sigmoid(beta_TN).contiguous()
            time_TN = F.softplus(time_TN.float() + gates.decay_bias_N)
            decay_TN = -gates.log_rate_N.float().exp() * time_TN
            solved = solve(mixed_TX, decay_TN, beta_TN, sizes, spread.chunks)
            kept = (matrices, spread.read_C, spread.to_M2)
            states = carry(mixed_TX, solved, sizes, spread.chunks, kept)
            out_TNV = read(mixed_TX, solved, states, sizes, spread.chunks)
            return gated_norm(out_TNV, gate_TX, gates.norm)

        return recur

    def _of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = self._cache.row_of[layer]
        return self._cache.rows[number], self._cache.matrices[number]


def _split(projected_TY: torch.Tensor, sizes: DeltaArgs) -> list[torch.Tensor]:
    heads = sizes.num_value_heads
    return list(projected_TY.split([sum(sizes.widths), sizes.widths[2], heads, heads], dim=1))


@dataclass(frozen=True, slots=True)
class _Spread:
    """Where the tokens and states of a prefill are; K states are kept of it."""

    chunks: Chunks
    position_T: torch.Tensor  # within its sequence's part
    sequence_T: torch.Tensor
    read_C: torch.Tensor
    to_M2: torch.Tensor
    kept_K: torch.Tensor  # states that are written
    own_KW: torch.Tensor  # the last W - 1 rows of each: tokens,
    is_own_KW: torch.Tensor
    old_KW: torch.Tensor  # or rows of the state that the part starts from

    @classmethod
    def of(cls, lengths: np.ndarray, spans: list[StateSpan], width: int, upload: Upload) -> _Spread:
        """`width` rows of the convolution belong to a state."""
        starts = np.cumsum(lengths) - lengths
        borders, to, kept = [], [], []
        for r, (length, span) in enumerate(zip(lengths.tolist(), spans, strict=True)):
            ends = sorted({length, *(after for after, _ in span.marks)})
            for begin, end in zip([0, *ends], ends, strict=False):
                marks = [state for after, state in span.marks if after == end]
                states = marks + [span.write] * (end == length)
                to += [[-1, -1]] * (-(-(end - begin) // CHUNK) - 1)
                to.append([*states, -1][:2])
                kept += [(state, r, end) for state in states]
            borders.append(ends)
        state_K, of_K, end_K = np.array(kept).T
        place_KW = end_K[:, None] - width + np.arange(width)
        read_C = np.array([span.read for span in spans])
        old_KW = read_C[of_K, None] * width + np.clip(place_KW + width, 0, width - 1)
        own_KW = starts[of_K, None] + np.maximum(place_KW, 0)
        position_T = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        return cls(
            chunks=Chunks.between(starts, borders, upload),
            position_T=upload(position_T.astype(np.int32)),
            sequence_T=upload(np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)),
            read_C=upload(read_C.astype(np.int32)),
            to_M2=upload(np.array(to, np.int32)),
            kept_K=upload(state_K),
            own_KW=upload(own_KW),
            is_own_KW=upload(place_KW >= 0),
            old_KW=upload(old_KW),
        )

    def keep_rows(self, rows: torch.Tensor, qkv_TX: torch.Tensor) -> None:
        """The last rows of each kept state, `rows` [S, W - 1, X]."""
        old_KWX = rows.flatten(0, 1)[self.old_KW]
        rows[self.kept_K] = torch.where(self.is_own_KW[..., None], qkv_TX[self.own_KW], old_KWX)
