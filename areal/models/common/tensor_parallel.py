"""Tensor parallelism for inference: each rank computes every token with a shard of the heads.

    ranks = Ranks.of(dist.group.WORLD)
    with torch.device("meta"):
        model = build_share(Qwen3Model, args, ranks)     # then as any model: to_empty, load_hf

Sharded: query, key and value heads, columns of the feed-forward and of each expert, rows of the LM
head. Replicated: norms, routers, the products of latent vectors, the embedding (a tied head reads
its rows of it) and biases of summed outputs. The outputs of attention and feed-forward are partial
sums, all-reduced over the ranks; logits are gathered. So hidden states and logits have the same
bits on all ranks, and all draw the same tokens.

Weights are loaded by Hugging Face name as unsharded tensors: each rank copies its slice.
`model.args` are those of the shard, except `vocab_size`.

Shapes: T tokens, V vocabulary, W a rank's shard of it, possibly smaller on the last rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs
from areal.models.common.moe import MoE

# The sharded dimension of a parameter, by the end of its name. The others are replicated.
CUT_DIMS: dict[str, int] = {
    **{f"attention.{w}.{kind}": 0 for w in ("wq", "wk", "wv") for kind in ("weight", "bias")},
    "attention.wq_b.weight": 0,
    "attention.wkv_b.weight": 0,
    **{f"feed_forward.{w}.{kind}": 0 for w in ("w1", "w3") for kind in ("weight", "bias")},
    "attention.wo.weight": 1,
    "feed_forward.w2.weight": 1,
    "feed_forward.experts.w1": 1,
    "feed_forward.experts.w3": 1,
    "feed_forward.experts.w2": 2,
    "feed_forward.shared.w1.weight": 0,
    "feed_forward.shared.w3.weight": 0,
    "feed_forward.shared.w2.weight": 1,
    "output.weight": 0,
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share one model. All of them call, in the same order."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers."""
        numbers = torch.tensor(number, device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.group)
        return int(numbers)

    def odd_one(self, number: int, device: torch.device) -> int:
        """The number of rank 0, or that of the first rank with another one; int64."""
        own = torch.tensor([number], device=device)
        numbers = own.new_empty(self.size, 1)
        dist.all_gather(list(numbers.unbind()), own, group=self.group)
        first, *others = numbers.flatten().tolist()
        return next((other for other in others if other != first), first)

    def join(self, part: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """The whole tensor, `size` long in `dim`, of which each rank has its `own_part`."""
        width = -(-size // self.size)
        padded = part.new_zeros(*part.shape[:dim], width, *part.shape[dim + 1 :])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        raw = padded.view(-1).view(torch.uint8)  # of any dtype, also one gloo does not know
        parts = raw.new_empty(self.size, len(raw))
        dist.all_gather(list(parts.unbind()), raw, group=self.group)
        whole = torch.cat([one.view(part.dtype).view(padded.shape) for one in parts], dim)
        return whole.narrow(dim, 0, size)

    def own_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice, a view."""
        width = -(-whole.shape[dim] // self.size)
        start = min(self.rank * width, whole.shape[dim])
        return whole.narrow(dim, start, min(width, whole.shape[dim] - start))


class SummedLinear(nn.Linear):
    """A linear layer with sharded input: partial products, all-reduced, then the bias."""

    def __init__(self, whole: nn.Linear, ranks: Ranks) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=whole.bias is not None)
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = self._ranks.add_up(F.linear(x, self.weight))
        return summed if self.bias is None else summed + self.bias


class SummedMoE(MoE):
    """Experts, and shared ones, sharded by columns: partial outputs, all-reduced."""

    def __init__(self, args: DecoderArgs, ranks: Ranks) -> None:
        super().__init__(args)
        self._ranks = ranks

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._ranks.add_up(super().forward(x_TD))


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank's model needs of the unsharded one."""

    ranks: Ranks
    whole_shapes: Mapping[str, torch.Size]  # by our names
    vocab_size: int

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the parameter `name`, a view of `whole`."""
        dim = cut_dim(name)
        return whole if dim is None else self.ranks.own_part(whole, dim)

    def join(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The whole of a sharded parameter; all ranks call."""
        dim = cut_dim(name)
        assert dim is not None, f"{name} is not sharded"
        return self.ranks.join(own.detach(), dim, self.whole_shapes[name][dim])

    def gather_logits(self, logits_TW: torch.Tensor) -> torch.Tensor:
        """[T, V] on every rank, gathered from the columns of each."""
        width = -(-self.vocab_size // self.ranks.size)
        padded_TW = F.pad(logits_TW, (0, width - logits_TW.shape[1])).contiguous()
        parts = padded_TW.new_empty(self.ranks.size, *padded_TW.shape)
        dist.all_gather(list(parts.unbind()), padded_TW, group=self.ranks.group)
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size].contiguous()


def cut_dim(name: str) -> int | None:
    """The sharded dimension of our parameter `name`; None if it is replicated."""
    return CUT_DIMS.get(name.partition("layers.")[2].partition(".")[2] or name)
