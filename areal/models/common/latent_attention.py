"""Multi-head latent attention: queries, keys and values of all heads come from short vectors.

    kv_TL, k_TR = wkv_a(x_TD)                     # one vector for all heads, and one rotated key
    k_TNP, v_TNV = wkv_b(norm(kv_TL))             # by head; queries likewise, or by one product

A head of queries and keys is P plain dims and R rotated ones, of which the key's are the same in
all heads. `attend` gets as many key-value heads as query heads, all of H = P + R dims: values are
padded with zeros, which its result has too, and `output` drops. So every back end of `attend`
computes it, at the price of a cache that keeps H dims of keys and of values per head.

Checkpoints rotate dimension 2i with 2i + 1. Scores do not depend on the order of dims, so both
queries and keys are put into the order of `rotate` first.

Shape legend: T tokens, D model dim, N heads, H head dim of queries and keys, P plain and R rotated
part of it, V head dim of values, L latent dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs
from areal.models.common.attention import AttentionLayer
from areal.models.common.rope import rotate

_NORM_EPS = 1e-6  # of the latent vectors, whatever the model's other norms use


class LatentAttention(AttentionLayer):
    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__(args, layer)
        self.sizes = args.latent_args
        q_rank, kv_rank = self.sizes.q_rank, self.sizes.kv_rank
        q_dim, value_dim = args.n_heads * args.head_dim, args.n_heads * self.sizes.value_dim
        if q_rank is None:
            self.wq = nn.Linear(args.dim, q_dim, bias=False)
        else:
            self.wq_a = nn.Linear(args.dim, q_rank, bias=False)
            self.q_norm = nn.RMSNorm(q_rank, _NORM_EPS)
            self.wq_b = nn.Linear(q_rank, q_dim, bias=False)
        self.wkv_a = nn.Linear(args.dim, kv_rank + self.sizes.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank, _NORM_EPS)
        kv_dim = args.n_heads * self.sizes.plain_dim + value_dim
        self.wkv_b = nn.Linear(kv_rank, kv_dim, bias=False)
        self.wo = nn.Linear(value_dim, args.dim, bias=False)

    def heads(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        q_TNP, q_TNR = self._queries(x_TD).split([sizes.plain_dim, sizes.rope_dim], dim=-1)
        kv_TL, k_TR = self.wkv_a(x_TD).split([sizes.kv_rank, sizes.rope_dim], dim=-1)
        kv_TNX = self.wkv_b(self.kv_norm(kv_TL)).unflatten(
            -1, (-1, sizes.plain_dim + sizes.value_dim)
        )
        k_TNP, v_TNV = kv_TNX.split([sizes.plain_dim, sizes.value_dim], dim=-1)
        q_TNR = rotate(_halves(q_TNR), cos_TR, sin_TR)
        k_T1R = rotate(_halves(k_TR[:, None]), cos_TR, sin_TR)
        k_TNR = k_T1R.expand(-1, k_TNP.shape[1], -1)
        v_TNH = F.pad(v_TNV, (0, self.head_dim - sizes.value_dim))
        return torch.cat((q_TNP, q_TNR), -1), torch.cat((k_TNP, k_TNR), -1), v_TNH

    def output(self, out_TNH: torch.Tensor) -> torch.Tensor:
        return self.wo(out_TNH[..., : self.sizes.value_dim].flatten(1))

    def _queries(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.sizes.q_rank is None:
            q_TX = self.wq(x_TD)
        else:
            q_TX = self.wq_b(self.q_norm(self.wq_a(x_TD)))
        return q_TX.unflatten(-1, (-1, self.head_dim))


def _halves(x_TNR: torch.Tensor) -> torch.Tensor:
    """Dims 0, 2, 4, ..., then 1, 3, 5, ...: pairs of neighbours become those of `rotate`."""
    return x_TNR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
