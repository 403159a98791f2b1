"""What a fused decoder block has before its feed-forward: attention of each kind, or delta rule.

    out_TD = mixer.forward(normed_TD, products, step)

A mixer reads the parameters of its module, or tensors these are views of (linear.py). What other
tokens matter for belongs to the caller: `Step.attend` and, of recurrent layers, `Rows.recur`.

Shape legend: T rows, D model dim, N query heads, K key/value heads, H head dim, X channels of the
delta rule, Y columns of all its projections; of latent attention P plain dims of a head of queries,
V dims of a head of values, L latent dim, X of what is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from areal.engine.native.cuda.block_kernels import Norm, rms_norm, rope_and_cache
from areal.engine.native.cuda.fp8_tensors import Fp8Rows
from areal.engine.native.cuda.hybrid_kernels import DeltaGates, gated_rope
from areal.engine.native.cuda.latent_attention import place_latents
from areal.engine.native.cuda.linear import Products, Projection, fuse_linears
from areal.engine.native.cuda.paged_cache import PagedCache
from areal.engine.native.cuda.states import DeltaWeights, Recur
from areal.models.common.args import DecoderArgs
from areal.models.common.attention import Attention, AttentionLayer
from areal.models.common.gated_layers import GatedAttention, GatedDelta
from areal.models.common.latent_attention import LatentAttention

# attend(layer, q_TNH, out_TNH) writes `out`; keys and values are already in the cache. Of latent
# attention queries are [T, N, X], and outputs [T, N, L].
Attend = Callable[[int, torch.Tensor, torch.Tensor], None]
# cos and sin [T, R]
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What the mixers of one forward share."""

    rotations: tuple[Rotation, Rotation]  # of layers without a window, and with one
    write_T: torch.Tensor  # flat cache position of each row's key and value
    attend: Attend
    recur: Recur | None


class Mixer(Protocol):
    projections: tuple[Projection, ...]

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, products: Products, step: Step
    ) -> torch.Tensor:
        """[T, D]"""
        ...


def make_mixer(attention: AttentionLayer, args: DecoderArgs, cache: PagedCache) -> Mixer:
    if isinstance(attention, GatedDelta):
        return DeltaMixer(attention)
    if isinstance(attention, GatedAttention):
        return GatedAttentionMixer(attention, args, cache)
    if isinstance(attention, LatentAttention):
        return LatentMixer(attention, cache)
    assert isinstance(attention, Attention), "`kernels_take` lets no other kind through"
    return AttentionMixer(attention, args, cache)


def norm_of(module: nn.RMSNorm, args: DecoderArgs) -> Norm:
    """One of the model's dim, or of heads."""
    return Norm(module.weight, args.norm_eps, offset=1.0 if args.zero_centered_norms else 0.0)


def _own_norm(module: nn.RMSNorm) -> Norm:
    """One with an eps of its own, which multiplies by its weight."""
    assert module.eps is not None, "the families' modules set one"
    return Norm(module.weight, module.eps)


class AttentionMixer:
    def __init__(self, attention: Attention, args: DecoderArgs, cache: PagedCache) -> None:
        self.qkv = fuse_linears(attention.wq, attention.wk, attention.wv)
        self.wo = fuse_linears(attention.wo)
        self.projections = (self.qkv, self.wo)
        self._layer, self._cache = attention.spec.layer, cache
        self._heads = (args.n_heads, args.head_dim)
        self._q_norm = attention.q_norm and norm_of(attention.q_norm, args)
        self._k_norm = attention.k_norm and norm_of(attention.k_norm, args)
        self._has_window = attention.spec.window is not None

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, products: Products, step: Step
    ) -> torch.Tensor:
        qkv_TX = products.project(normed_TD, self.qkv)
        return products.project(self.attended(qkv_TX, step), self.wo)

    def attended(self, qkv_TX: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, N * H], before the output projection."""
        q_TNH = qkv_TX.new_empty(len(qkv_TX), *self._heads)
        keys, values = self._cache.layer(self._layer)
        rope_and_cache(
            qkv_TX, *step.rotations[self._has_window], step.write_T, keys, values, q_TNH,
            self._q_norm, self._k_norm, self._cache.scales(self._layer),
        )  # fmt: skip
        out_TNH = torch.empty_like(q_TNH)
        step.attend(self._layer, q_TNH, out_TNH)
        return out_TNH.flatten(1)


class GatedAttentionMixer:
    def __init__(self, attention: GatedAttention, args: DecoderArgs, cache: PagedCache) -> None:
        assert attention.q_norm is not None and attention.k_norm is not None
        self._qkv = fuse_linears(attention.wq, attention.wk, attention.wv)
        self._wo = fuse_linears(attention.wo)
        self.projections = (self._qkv, self._wo)
        self._layer, self._cache = attention.spec.layer, cache
        self._heads = (args.n_heads, args.head_dim)
        self._norms = norm_of(attention.q_norm, args), norm_of(attention.k_norm, args)

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, products: Products, step: Step
    ) -> torch.Tensor:
        qkv_TX = products.project(normed_TD, self._qkv)
        num_heads, head_dim = self._heads
        q_TNH = qkv_TX.new_empty(len(qkv_TX), num_heads, head_dim)
        cache = self._cache.layer(self._layer)
        gated_rope(qkv_TX, *step.rotations[0], step.write_T, *cache, q_TNH, *self._norms)
        out_TNH = torch.empty_like(q_TNH)
        step.attend(self._layer, q_TNH, out_TNH)
        both_TN2H = qkv_TX[:, : 2 * num_heads * head_dim].unflatten(1, (num_heads, 2, head_dim))
        gated_TNH = out_TNH * torch.sigmoid(both_TN2H[:, :, 1])
        return products.project(gated_TNH.flatten(1), self._wo)


class LatentMixer:
    """The product that makes keys of a latent vector is applied to the queries, the one that makes
    values to the sums of latent vectors: a score is (q W_k) . latent = q . (W_k' latent)."""

    def __init__(self, attention: LatentAttention, cache: PagedCache) -> None:
        sizes = attention.sizes
        self._q_norm: Norm | None = None
        if sizes.q_rank is None:
            self._in = fuse_linears(attention.wq, attention.wkv_a)
            inner = []
        else:
            self._in = fuse_linears(attention.wq_a, attention.wkv_a)
            self._q_norm = _own_norm(attention.q_norm)
            self._q_b = fuse_linears(attention.wq_b)
            inner = [self._q_b]
        self._wo = fuse_linears(attention.wo)
        self.projections = (self._in, *inner, self._wo)
        self._kv_norm = _own_norm(attention.kv_norm)
        weight = fuse_linears(attention.wkv_b).weight
        assert isinstance(weight, torch.Tensor), "latent attention has no FP8 weights"
        by_head = weight.detach().unflatten(0, (-1, sizes.plain_dim + sizes.value_dim))
        self._keys_NPL, self._values_NVL = by_head.split([sizes.plain_dim, sizes.value_dim], dim=1)
        self._head_dim = attention.head_dim
        self._layer, self._cache = attention.spec.layer, cache

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, products: Products, step: Step
    ) -> torch.Tensor:
        q_TY, kv_TX = self._projected(normed_TD, products)
        q_TNH = q_TY.unflatten(1, (-1, self._head_dim))
        num_rows, num_heads, _ = q_TNH.shape
        _, plain_dim, latent_dim = self._keys_NPL.shape
        q_TNX = q_TY.new_empty(num_rows, num_heads, kv_TX.shape[1])
        torch.bmm(
            q_TNH[:, :, :plain_dim].transpose(0, 1),
            self._keys_NPL,
            out=q_TNX[:, :, :latent_dim].transpose(0, 1),
        )
        place_latents(
            q_TNH, kv_TX, self._kv_norm, *step.rotations[0], step.write_T,
            self._cache.latents(self._layer), q_TNX,
        )  # fmt: skip
        out_TNL = q_TY.new_empty(num_rows, num_heads, latent_dim)
        step.attend(self._layer, q_TNX, out_TNL)
        out_TNV = q_TY.new_empty(num_rows, num_heads, self._values_NVL.shape[1])
        torch.bmm(
            out_TNL.transpose(0, 1), self._values_NVL.transpose(1, 2), out=out_TNV.transpose(0, 1)
        )
        return products.project(out_TNV.flatten(1), self._wo)

    def _projected(
        self, normed_TD: torch.Tensor | Fp8Rows, products: Products
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of all heads, [T, N * H], and the latent vector with the key beside it."""
        first_TY = products.project(normed_TD, self._in)
        num_queries = len(self._in.linears[0].weight)
        q_TY, kv_TX = first_TY[:, :num_queries], first_TY[:, num_queries:]
        if self._q_norm is not None:
            short_TY = q_TY.new_empty(q_TY.shape)
            rms_norm(q_TY, self._q_norm, short_TY)
            q_TY = products.project(short_TY, self._q_b)
        return q_TY, kv_TX


class DeltaMixer:
    def __init__(self, delta: GatedDelta) -> None:
        self._in = fuse_linears(delta.in_qkv, delta.in_gate, delta.in_beta, delta.in_decay)
        self._out = fuse_linears(delta.out)
        self.projections = (self._in, self._out)
        gates = DeltaGates(delta.log_rate, delta.decay_bias, _own_norm(delta.norm))
        self._weights = DeltaWeights(delta.spec.layer, delta.kernel.detach()[:, 0], gates)

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, products: Products, step: Step
    ) -> torch.Tensor:
        assert step.recur is not None, "the program has states of such a model"
        projected_TY = products.project(normed_TD, self._in)
        return products.project(step.recur(self._weights, projected_TY), self._out)
