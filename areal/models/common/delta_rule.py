"""The gated delta rule: attention by a matrix per head that every token decays, corrects and reads.

    S = exp(g_t) S;   S = S + k_t u_t',  u_t = beta_t (v_t - S' k_t);   out_t = S' q_t

`recur_packed` computes it for packed sequences, differentiable, in chunks of C tokens (in plain
torch; on a GPU delta_kernels.py does): within a chunk the corrections u solve a triangular system,
so that only the states between chunks are computed one after the other. With G the sum of g since
the chunk began and S0 the state there:

    (I + L) U = beta (V - exp(G) K S0),   L_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i
    out_i = exp(G_i) S0' q_i + sum over j <= i of exp(G_i - G_j) (q_i.k_j) u_j

Chunks belong to one sequence each, the last one padded with tokens that change nothing. They are
ordered by their number within the sequence, sequences with the most chunks first: chunks of one
number are neighbours, and are one product. No sequence sees another: each starts from zeros.

`step` is one token of many sequences. A decoder calls it token by token, also for prompts: its
sums have one order, so the state after a token has the same bits however the tokens before it
were cut. (Chunks of other borders round otherwise.)

Before it, queries, keys and values go through a short causal convolution (`convolve_packed`, or
with the rows before the first token, `convolve`). State and sums are float32.

Shape legend: T tokens, X channels of the convolution, W its size, N value heads, K key dim, V value
dim, M chunks, C tokens of a chunk, R sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from areal.models.common.args import DeltaArgs

CHUNK = 64
NORM_EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What one layer computes of each token alone."""

    qkv_TX: torch.Tensor  # queries, keys and values of all heads, before the convolution
    decay_TN: torch.Tensor  # float32, logarithm of the factor on the state: g, at most 0
    beta_TN: torch.Tensor  # share of a correction that is written, in (0, 1)
    kernel_XW: torch.Tensor  # of the convolution, the token's own weight last


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Float32, after the convolution; queries and keys of length 1, queries scaled."""

    q_TNK: torch.Tensor
    k_TNK: torch.Tensor
    v_TNV: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where the tokens of packed sequences are among the M * C places of their chunks."""

    size: int  # C
    place_T: torch.Tensor  # of each token
    token_P: torch.Tensor  # at each place; T where there is none
    counts: list[int]  # sequences that have a first, a second, ... chunk

    @classmethod
    def of(cls, lengths: torch.Tensor, device: torch.device, size: int = CHUNK) -> ChunkLayout:
        """`lengths` of the sequences, int64 on the CPU."""
        size = max(1, min(size, int(lengths.max())))
        chunks = -(-lengths // size)
        rank = torch.empty_like(chunks)
        rank[chunks.argsort(descending=True, stable=True)] = torch.arange(len(chunks))
        counts = [int((chunks > number).sum()) for number in range(int(chunks.max()))]
        first = torch.tensor([0, *counts]).cumsum(0)
        num_tokens = int(lengths.sum())
        start_T = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        position_T = torch.arange(num_tokens) - start_T
        chunk_T = first[position_T // size] + rank.repeat_interleave(lengths)
        place_T = chunk_T * size + position_T % size
        token_P = torch.full((int(first[-1]) * size,), num_tokens)
        token_P[place_T] = torch.arange(num_tokens)
        return cls(size, place_T.to(device), token_P.to(device), counts)

    def cut(self, x_T: torch.Tensor) -> torch.Tensor:
        """[T, N, ...] -> [M, N, C, ...], zeros where there is no token."""
        zero = x_T.new_zeros(1, *x_T.shape[1:])
        x_P = torch.cat([x_T, zero]).index_select(0, self.token_P)
        return x_P.unflatten(0, (-1, self.size)).transpose(1, 2)

    def join(self, x_MNC: torch.Tensor) -> torch.Tensor:
        """The reverse of `cut`."""
        return x_MNC.transpose(1, 2).flatten(0, 1).index_select(0, self.place_T)


def has_tiles(sizes: DeltaArgs) -> bool:
    """Whether delta_kernels.py computes such heads: a tile of one is a power of two, and a program
    holds several."""
    return all(dim in (16, 32, 64, 128) for dim in (sizes.key_dim, sizes.value_dim))


def recur_packed(
    inputs: DeltaInputs, sizes: DeltaArgs, positions_T: torch.Tensor, layout: ChunkLayout
) -> torch.Tensor:
    """Outputs [T, N, V] of packed sequences, each from a state of zeros."""
    qkv_TX = convolve_packed(inputs.qkv_TX, inputs.kernel_XW, positions_T)
    heads = split_heads(qkv_TX, sizes)
    out_TNV = chunked(heads, inputs.decay_TN, inputs.beta_TN.float(), layout)
    return out_TNV.to(inputs.qkv_TX.dtype)


def convolve_packed(
    x_TX: torch.Tensor, kernel_XW: torch.Tensor, positions_T: torch.Tensor
) -> torch.Tensor:
    """Each channel's weighted sum of a token and the ones before it in its sequence, then silu."""
    num_tokens, size = len(x_TX), kernel_XW.shape[1]
    out_TX = x_TX * kernel_XW[:, -1]
    for back in range(1, min(size, num_tokens)):
        before_TX = F.pad(x_TX[: num_tokens - back], (0, 0, back, 0))
        is_own_T1 = (positions_T >= back)[:, None]
        out_TX = out_TX + torch.where(is_own_T1, before_TX, 0) * kernel_XW[:, size - 1 - back]
    return F.silu(out_TX)


def convolve(x_LX: torch.Tensor, last_T: torch.Tensor, kernel_XW: torch.Tensor) -> torch.Tensor:
    """The same, of the tokens at rows `last_T` of `x_LX`, in which the W - 1 rows before each are
    those of its sequence."""
    size = kernel_XW.shape[1]
    out_TX = x_LX[last_T] * kernel_XW[:, -1]
    for back in range(1, size):
        out_TX = out_TX + x_LX[last_T - back] * kernel_XW[:, size - 1 - back]
    return F.silu(out_TX)


def split_heads(qkv_TX: torch.Tensor, sizes: DeltaArgs) -> DeltaHeads:
    q_TX, k_TX, v_TX = qkv_TX.float().split(list(sizes.widths), dim=-1)
    group = sizes.num_value_heads // sizes.num_key_heads

    def unit(x_TX: torch.Tensor) -> torch.Tensor:
        x_THK = x_TX.unflatten(-1, (-1, sizes.key_dim))
        x_THK = x_THK * torch.rsqrt((x_THK * x_THK).sum(-1, keepdim=True) + NORM_EPS)
        return x_THK if group == 1 else x_THK.repeat_interleave(group, dim=1)

    v_TNV = v_TX.unflatten(-1, (-1, sizes.value_dim))
    return DeltaHeads(unit(q_TX) * sizes.key_dim**-0.5, unit(k_TX), v_TNV)


def chunked(
    heads: DeltaHeads, decay_TN: torch.Tensor, beta_TN: torch.Tensor, layout: ChunkLayout
) -> torch.Tensor:
    q_MNCK, k_MNCK = layout.cut(heads.q_TNK), layout.cut(heads.k_TNK)
    beta_MNC1 = layout.cut(beta_TN)[..., None]
    sum_MNC = layout.cut(decay_TN).cumsum(-1)
    since_MNC1 = sum_MNC.exp()[..., None]
    # Masked before the exponential, which would overflow above the diagonal.
    is_before_CC = torch.ones(layout.size, layout.size, dtype=torch.bool, device=sum_MNC.device)
    difference_MNCC = sum_MNC[..., :, None] - sum_MNC[..., None, :]
    decay_MNCC = difference_MNCC.masked_fill(~is_before_CC.tril(), -torch.inf).exp()
    keys_MNKC = k_MNCK.transpose(-1, -2)
    system_MNCC = (k_MNCK @ keys_MNKC) * decay_MNCC * beta_MNC1
    written_MNCV = layout.cut(heads.v_TNV) * beta_MNC1
    read_MNCK = k_MNCK * (beta_MNC1 * since_MNC1)
    # Only what is below the diagonal is read: the system is I + L.
    solved = torch.linalg.solve_triangular(
        system_MNCC, torch.cat([written_MNCV, read_MNCK], -1), upper=False, unitriangular=True
    )
    written_MNCV, read_MNCK = solved.split([written_MNCV.shape[-1], k_MNCK.shape[-1]], dim=-1)
    until_end_MNC1 = (sum_MNC[..., -1:] - sum_MNC).exp()[..., None]
    out_MNCV = _scan(
        layout.counts,
        written_MNCV,
        read_MNCK,
        (q_MNCK @ keys_MNKC) * decay_MNCC,
        q_MNCK * since_MNC1,
        (k_MNCK * until_end_MNC1).transpose(-1, -2),
        since_MNC1[..., -1:, :],
    )
    return layout.join(out_MNCV)


def _scan(
    counts: list[int],
    written_MNCV: torch.Tensor,
    read_MNCK: torch.Tensor,
    scores_MNCC: torch.Tensor,
    q_MNCK: torch.Tensor,
    keys_MNKC: torch.Tensor,
    decay_MN11: torch.Tensor,
) -> torch.Tensor:
    """The states from chunk to chunk; all factors of decay are in the arguments already."""
    shape = (counts[0], written_MNCV.shape[1], q_MNCK.shape[-1], written_MNCV.shape[-1])
    state_RNKV = written_MNCV.new_zeros(shape)
    parts = zip(
        *(
            x.split(counts)
            for x in (written_MNCV, read_MNCK, scores_MNCC, q_MNCK, keys_MNKC, decay_MN11)
        ),
        strict=True,
    )
    outputs = []
    for written_RNCV, read_RNCK, scores_RNCC, q_RNCK, keys_RNKC, decay_RN11 in parts:
        state_RNKV = state_RNKV[: len(written_RNCV)]  # the others have ended
        correction_RNCV = written_RNCV - read_RNCK @ state_RNKV
        outputs.append(q_RNCK @ state_RNKV + scores_RNCC @ correction_RNCV)
        state_RNKV = state_RNKV * decay_RN11 + keys_RNKC @ correction_RNCV
    return torch.cat(outputs)


def step(
    state_RNKV: torch.Tensor, heads: DeltaHeads, kept_RN: torch.Tensor, beta_RN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [R, N, V] of one token of each sequence, and the states after it.

    `kept_RN` is the exp of the decay."""
    k_RNK1 = heads.k_TNK[..., None]
    state_RNKV = state_RNKV * kept_RN[..., None, None]
    known_RNV = (state_RNKV * k_RNK1).sum(-2)
    correction_RNV = (heads.v_TNV - known_RNV) * beta_RN[..., None]
    state_RNKV = state_RNKV + k_RNK1 * correction_RNV[:, :, None]
    return (state_RNKV * heads.q_TNK[..., None]).sum(-2), state_RNKV
