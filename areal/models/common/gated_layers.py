"""The two layers of a hybrid decoder: gated delta rule, and attention whose output is gated.

Both end like attention does, but for a gate that the token itself computes:

    *mixed, gate_TX = layer.project(norm(x_TD), cos_TR, sin_TR)     # of each token alone
    out = layer.mix(attend, *mixed)                                 # over the sequence
    x_TD += layer.gated_output(out, gate_TX)                        # of each token alone

`mix` is the only step that other tokens matter for, and belongs to `attend`: `attend(...)` of
attention.py, or `attend.recur(...)`, which knows where sequences begin and where their states are.

Shape legend: T tokens, D model dim, N query (or value) heads, K key-value heads, H head dim, R half
of the rotated dims, X channels of the convolution, W its size, V value dim of the delta rule.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs, DeltaArgs
from areal.models.common.attention import Attend, Attention, AttentionLayer
from areal.models.common.delta_rule import DeltaInputs
from areal.models.common.rope import rotate_leading

Tensors = tuple[torch.Tensor, ...]


class AttendOrRecur(Attend, Protocol):
    """A back end that also keeps the states of recurrent layers."""

    def recur(self, layer: int, inputs: DeltaInputs, sizes: DeltaArgs, /) -> torch.Tensor:
        """[T, N, V], each sequence after the state it has."""
        ...


class GatedAttention(Attention):
    """Grouped-query attention. A head of `wq` has its query, then its gate; of a head only the
    leading dims are rotated."""

    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__(args, layer)
        self.wq = nn.Linear(args.dim, 2 * args.n_heads * args.head_dim, bias=args.qkv_bias)

    def project(self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> Tensors:
        q_TNH, gate_TNH = self.wq(x_TD).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        k_TKH = self.wk(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.wv(x_TD).unflatten(-1, (-1, self.head_dim))
        assert self.q_norm is not None and self.k_norm is not None, "hybrids have norms of heads"
        q_TNH = rotate_leading(self.q_norm(q_TNH), cos_TR, sin_TR)
        k_TKH = rotate_leading(self.k_norm(k_TKH), cos_TR, sin_TR)
        return q_TNH, k_TKH, v_TKH, gate_TNH.flatten(1)

    def mix(self, attend: AttendOrRecur, *mixed: torch.Tensor) -> torch.Tensor:
        q_TNH, k_TKH, v_TKH = mixed
        return attend(self.spec, q_TNH, k_TKH, v_TKH)

    def gated_output(self, out_TNH: torch.Tensor, gate_TX: torch.Tensor) -> torch.Tensor:
        return self.wo(out_TNH.flatten(1) * torch.sigmoid(gate_TX))


class GatedNorm(nn.RMSNorm):
    """RMS norm in float32, weighed by the silu of a gate."""

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype)
        return (self.weight * normed * F.silu(gate.float())).to(x.dtype)


class GatedDelta(AttentionLayer):
    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__(args, layer)
        self.sizes = args.delta_args
        heads, value_width = self.sizes.num_value_heads, self.sizes.widths[2]
        num_channels = sum(self.sizes.widths)
        self.in_qkv = nn.Linear(args.dim, num_channels, bias=False)
        self.in_gate = nn.Linear(args.dim, value_width, bias=False)
        self.in_beta = nn.Linear(args.dim, heads, bias=False)
        self.in_decay = nn.Linear(args.dim, heads, bias=False)
        self.kernel = nn.Parameter(torch.empty(num_channels, 1, self.sizes.conv_size))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.decay_bias = nn.Parameter(torch.empty(heads))
        self.norm = GatedNorm(self.sizes.value_dim, args.norm_eps)
        self.out = nn.Linear(value_width, args.dim, bias=False)

    def drawn_weights(self, generator: torch.Generator) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Initial values of what is no linear layer."""
        kernel = torch.empty(self.kernel.shape, device="cpu")
        bound = self.sizes.conv_size**-0.5
        kernel.uniform_(-bound, bound, generator=generator)
        rate = torch.empty(self.log_rate.shape, device="cpu")
        rate.uniform_(0.01, 16, generator=generator)  # heads forget at many speeds
        ones = torch.ones(self.decay_bias.shape, device="cpu")
        return [(self.kernel, kernel), (self.log_rate, rate.log()), (self.decay_bias, ones)]

    def project(self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> Tensors:
        beta_TN = torch.sigmoid(self.in_beta(x_TD))
        time_TN = F.softplus(self.in_decay(x_TD).float() + self.decay_bias)
        decay_TN = -self.log_rate.float().exp() * time_TN
        return self.in_qkv(x_TD), decay_TN, beta_TN, self.in_gate(x_TD)

    def mix(self, attend: AttendOrRecur, *mixed: torch.Tensor) -> torch.Tensor:
        qkv_TX, decay_TN, beta_TN = mixed
        inputs = DeltaInputs(qkv_TX, decay_TN, beta_TN, self.kernel[:, 0])
        return attend.recur(self.spec.layer, inputs, self.sizes)

    def gated_output(self, out_TNV: torch.Tensor, gate_TX: torch.Tensor) -> torch.Tensor:
        gate_TNV = gate_TX.unflatten(-1, out_TNV.shape[1:])
        return self.out(self.norm.gated(out_TNV, gate_TNV).flatten(1))
