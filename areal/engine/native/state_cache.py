"""States of recurrent layers, beside the pages of keys and values.

A state is what all recurrent layers of a model keep of a sequence: the last rows that went into
their convolutions, and a matrix per head (models/common/delta_rule.py). Unlike keys and values it
cannot be cut back to an earlier token. So a cached prompt is usable only where a state was kept
(a *mark*), which is done at borders of pages: kv_cache.py decides where, and owns the numbers.

| holder            | states                                                                    |
|-------------------|---------------------------------------------------------------------------|
| running sequence  | its own, and a mark at the last border it has passed                      |
| prompt            | its own, which every sample copies, and the marks made on the way         |
| page of the table | the mark at its end                                                       |

`StateRows` describes one forward on the host: rows of consecutive tokens of some sequences, which
state each starts from, where it is left, and which marks are made on the way. State 0 is that of an
empty sequence, and never written.

Invariant (CPU): the state after a token, and the output of the layer, have the same bits whatever
is computed beside it and however the tokens before it were cut: tokens are computed one by one.

Shape legend: T rows, R sequences, X channels and W size of the convolution, N heads, K key dim, V
value dim, S states, L rows of all sequences with the W - 1 before each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from areal.models.common.delta_rule import DeltaHeads, DeltaInputs, convolve, split_heads, step

if TYPE_CHECKING:
    from areal.engine.native.kv_cache import StateSpan
    from areal.models.common.args import DecoderArgs, DeltaArgs
    from areal.models.common.decoder import Decoder


class StateCache:
    """States by layer (`row_of` has its number), as `[S, W - 1, X]` and, in float32,
    `[S, N, K, V]`."""

    def __init__(self, model: Decoder, num_states: int) -> None:
        args, weight = model.args, model.embedding_weight
        sizes = args.delta_args
        self.row_of = {layer: row for row, layer in enumerate(sorted(sizes.layers))}
        rows_shape, matrix_shape = _shapes(sizes)
        layers = len(self.row_of)
        self.rows = weight.new_zeros(layers, num_states, *rows_shape)
        self.matrices = weight.new_zeros(layers, num_states, *matrix_shape, dtype=torch.float32)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        # Layer by layer: between the two there is a copy of what is copied.
        for states in (*self.rows, *self.matrices):
            states.index_copy_(0, target, states.index_select(0, source))

    def recur(
        self, layer: int, inputs: DeltaInputs, sizes: DeltaArgs, rows: StateRows
    ) -> torch.Tensor:
        """[T, N, V]; zeros for rows of no sequence."""
        row = self.row_of[layer]
        heads = self._convolved(self.rows[row], inputs, sizes, rows)
        qkv_TX = inputs.qkv_TX
        out_TNV = heads.v_TNV.new_zeros(len(qkv_TX), *heads.v_TNV.shape[1:])
        states, beta_TN = self.matrices[row], inputs.beta_TN.float()
        kept_TN = inputs.decay_TN.exp()
        state_RNKV = states[rows.read_R]
        for number, row_R in enumerate(rows.rows_of_step):
            if len(row_R) < len(state_RNKV):  # some have ended
                states[rows.write_R[len(row_R) : len(state_RNKV)]] = state_RNKV[len(row_R) :]
                state_RNKV = state_RNKV[: len(row_R)]
            own = DeltaHeads(heads.q_TNK[row_R], heads.k_TNK[row_R], heads.v_TNV[row_R])
            out_RNV, state_RNKV = step(state_RNKV, own, kept_TN[row_R], beta_TN[row_R])
            out_TNV[row_R] = out_RNV
            for sequence, target in rows.marks_of_step.get(number, ()):
                states[target] = state_RNKV[sequence]
        states[rows.write_R[: len(state_RNKV)]] = state_RNKV
        return out_TNV.to(qkv_TX.dtype)

    def _convolved(
        self, before: torch.Tensor, inputs: DeltaInputs, sizes: DeltaArgs, rows: StateRows
    ) -> DeltaHeads:
        """Heads of all rows; keeps the last rows of each sequence.

        Also of those that are padding, which repeat the first: functions like exp may round an
        element otherwise at the end of a tensor, so its rows are always whole tiles."""
        qkv_TX = inputs.qkv_TX[: rows.num_rows]
        around_LX = qkv_TX.new_empty(rows.num_around, qkv_TX.shape[1])
        around_LX[rows.before_RW] = before[rows.read_R]
        around_LX[rows.own_T] = qkv_TX
        before[rows.write_R] = around_LX[rows.last_RW]
        if rows.marked_M is not None and rows.marked_MW is not None:
            before[rows.marked_M] = around_LX[rows.marked_MW]
        num_padding = len(inputs.qkv_TX) - rows.num_rows
        own_T = F.pad(rows.own_T, (0, num_padding), value=int(rows.own_T[0]))
        return split_heads(convolve(around_LX, own_T, inputs.kernel_XW), sizes)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Sequences are ordered by their number of rows, most first."""

    num_rows: int  # of sequences; the others are padding
    num_around: int  # L
    read_R: torch.Tensor
    write_R: torch.Tensor
    before_RW: torch.Tensor  # among the L rows: the W - 1 before the first of each sequence
    own_T: torch.Tensor  # among the L rows
    last_RW: torch.Tensor  # among the L rows: the last W - 1 of each sequence
    rows_of_step: list[torch.Tensor]  # the first row of each sequence, the second, ...
    marks_of_step: dict[int, list[tuple[int, int]]]  # (sequence, state) to mark after a step
    marked_M: torch.Tensor | None  # all states that are marks
    marked_MW: torch.Tensor | None  # among the L rows: the last W - 1 of each mark

    @classmethod
    def of(
        cls, lengths: list[int], spans: list[StateSpan], sizes: DeltaArgs, device: torch.device
    ) -> StateRows:
        """Of sequences with `lengths` rows each, one after the other."""
        width = sizes.conv_size - 1
        count = np.array(lengths)
        first = np.cumsum(count) - count
        order = np.argsort(-count, kind="stable")
        # Among the L rows each sequence has `width` rows more than here, before its first.
        around = first + width * np.arange(len(count))
        back = np.arange(width)
        own = np.arange(count.sum()) + np.repeat(width * (1 + np.arange(len(count))), count)
        alive = [order[: int((count > number).sum())] for number in range(int(count.max()))]
        place = {sequence: number for number, sequence in enumerate(order.tolist())}
        marks = [(r, after, to) for r, span in enumerate(spans) for after, to in span.marks]
        of_step: dict[int, list[tuple[int, int]]] = {}
        for sequence, after, target in marks:
            of_step.setdefault(after - 1, []).append((place[sequence], target))

        def upload(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            num_rows=int(count.sum()),
            num_around=int(count.sum()) + width * len(count),
            read_R=upload(np.array([spans[r].read for r in order])),
            write_R=upload(np.array([spans[r].write for r in order])),
            before_RW=upload(around[order, None] + back),
            own_T=upload(own),
            last_RW=upload((around + count)[order, None] + back),
            rows_of_step=[upload(first[some] + number) for number, some in enumerate(alive)],
            marks_of_step=of_step,
            marked_M=upload(np.array([to for _, _, to in marks])) if marks else None,
            marked_MW=upload(np.array([around[r] + after for r, after, _ in marks])[:, None] + back)
            if marks
            else None,
        )


def state_bytes(args: DecoderArgs, itemsize: int) -> int:
    """Of one state in all layers, with model numbers of `itemsize` bytes."""
    sizes = args.delta_args
    rows_shape, matrix_shape = _shapes(sizes)
    numbers = int(np.prod(rows_shape)) * itemsize + int(np.prod(matrix_shape)) * 4
    return len(sizes.layers) * numbers


def _shapes(sizes: DeltaArgs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = (sizes.conv_size - 1, sum(sizes.widths))
    return rows, (sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
