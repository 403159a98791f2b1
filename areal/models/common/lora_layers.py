"""Layers with a low-rank adapter beside a frozen weight: a linear layer, and stacked experts.

    out = x W' + (x A') B' * scaling

State dicts are those of the plain layers, so checkpoints of the model fit unchanged. Adapters are
added before sharding (models/lora.py), and sharded so that only R numbers per token are exchanged:

| weight           | A [R, D]         | B [N, R]         | exchanged over tp                     |
|------------------|------------------|------------------|---------------------------------------|
| sharded by N     | replicated       | sharded by N     | gradients of A                        |
| sharded by D     | sharded by D     | replicated       | x A', scattered over tokens           |
| experts over ep  | sharded by E     | sharded by E     | nothing                               |
| experts over etp | as the two above | as the two above | gradients of what is replicated       |

Shape legend: T tokens, D inputs, N outputs, R rank, E experts, S rows of tokens by expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)


class LoraLinear(nn.Linear):
    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and fill another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scaling = alpha / rank
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, **like))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, **like))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TN, low_TR = super().forward(x_TD), F.linear(x_TD, self.lora_A)
        if isinstance(out_TN, DTensor) and out_TN.placements[0].is_partial():
            assert isinstance(low_TR, DTensor), "computed from the same input"
            # Partial sums: their sum is needed by token, as the residual stream is sharded.
            out_TN = out_TN.redistribute(placements=[Shard(0)])
            low_TR = low_TR.redistribute(placements=[Shard(0)])
        return out_TN + F.linear(low_TR, self.lora_B) * self.scaling

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name in ("weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def cut_like_weight(self, tp: DeviceMesh) -> None:
        """After the weight was sharded over `tp`, on the meta device."""
        assert isinstance(self.weight, DTensor), "parallelize_module has sharded it"
        by_rows = self.weight.placements[0].is_shard(0)
        like = {"device": "meta", "dtype": self.weight.dtype}
        a_RD = torch.empty(self.lora_A.shape, **like)
        b_NR = torch.empty(self.lora_B.shape, **like)
        self.lora_A = _sharded(a_RD, tp, [Replicate() if by_rows else Shard(1)])
        self.lora_B = _sharded(b_NR, tp, [Shard(0) if by_rows else Replicate()])


class ExpertLora(nn.Module):
    """The adapters of one stack [E, N, D] of expert weights: A [E, R, D], B [E, N, R]."""

    def __init__(self, weight: nn.Parameter, *, rank: int, alpha: float) -> None:
        super().__init__()
        num_experts, num_out, num_in = weight.shape
        self.rank, self.scaling = rank, alpha / rank
        self.lora_A = nn.Parameter(weight.new_empty(num_experts, rank, num_in))
        self.lora_B = nn.Parameter(weight.new_empty(num_experts, num_out, rank))

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of the local experts."""
        return _local(self.lora_A), _local(self.lora_B)

    def spread(self, mesh: DeviceMesh, columns_dim: int) -> None:
        """Shard over the axes ep and etp; `columns_dim`: of the weight, the one etp shards."""
        by_rows = columns_dim == 1
        places = [Replicate() if by_rows else Shard(2), Shard(1) if by_rows else Replicate()]
        self.lora_A = _sharded(self.lora_A.detach(), mesh, [Shard(0), places[0]])
        self.lora_B = _sharded(self.lora_B.detach(), mesh, [Shard(0), places[1]])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        pass


def _sharded(tensor: torch.Tensor, mesh: DeviceMesh, places: list[Placement]) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor, mesh, places))


def _local(weight: torch.Tensor) -> torch.Tensor:
    """Its gradient is summed over the ranks that have a copy: each sees a shard of the columns."""
    if not isinstance(weight, DTensor):
        return weight
    places = [Partial() if place.is_replicate() else place for place in weight.placements]
    return weight.to_local(grad_placements=places)
