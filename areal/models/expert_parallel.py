"""Expert parallelism: rows of tokens are sent to the rank that holds their expert, and back.

    spread = SpreadExperts(args, mesh["ep", "etp"])     # on the meta device
    spread.take_adapters(block.feed_forward.experts)
    block.feed_forward.experts = spread

Each rank of the axis ep holds E / ep consecutive experts, in full or, with etp = tp, a shard of the
columns of each. Its weights are DTensors of the full stacks, so names, shapes, checkpoints and the
optimizer are unaffected.

    x_SD by expert -> exchange -> x_QD by rank and expert -> by expert -> experts -> all that back

The exchange is uneven: a rank sends each other what its tokens chose, possibly nothing. The host
needs the number of received rows, so it synchronises with the device once per layer.

Shape legend: S rows sent, Q received, D model dim, E experts, R = ep ranks, L = E / R experts here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from areal.models.common.lora_layers import ExpertLora
from areal.models.common.moe import Experts

if TYPE_CHECKING:
    from areal.models.common.args import DecoderArgs

# The dimension of the experts' columns, sharded over etp; the model dim is sharded by FSDP only.
_COLUMNS_DIM = {"w1": 1, "w2": 2, "w3": 1}
_MODEL_DIM = {"w1": 2, "w2": 1, "w3": 2}


class SpreadExperts(Experts):
    """Replaces `Experts`, with the rows and counts of all experts. All ranks of ep call."""

    w1: DTensor
    w2: DTensor
    w3: DTensor

    def __init__(self, args: DecoderArgs, mesh: DeviceMesh) -> None:
        """`mesh` has the axes ep and etp."""
        super().__init__(args)
        self._mesh, self._group = mesh, mesh.get_group("ep")
        for name, weight in list(self.named_parameters()):
            places = [Shard(0), Shard(_COLUMNS_DIM[name])]
            setattr(self, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, places)))

    def take_adapters(self, experts: Experts) -> None:
        """Train what `experts` train: all weights, or adapters alone, which move here."""
        self.requires_grad_(experts.w1.requires_grad)
        for name, adapter in experts.adapters.items():
            cast("ExpertLora", adapter).spread(self._mesh, _COLUMNS_DIM[name])
        self.adapters = experts.adapters

    def weights(self) -> tuple[torch.Tensor, ...]:
        return self.w1.to_local(), self.w2.to_local(), self.w3.to_local()

    def forward(self, x_SD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        sent_RL = counts_E.view(self._group.size(), -1)
        received_RL = torch.empty_like(sent_RL)
        dist.all_to_all_single(received_RL, sent_RL, group=self._group)
        num_sent, num_received = torch.stack([sent_RL.sum(1), received_RL.sum(1)]).tolist()
        x_QD = _Exchange.apply(x_SD, num_sent, num_received, self._group)
        order_Q = _by_expert(received_RL, sum(num_received))
        out_QD = super().forward(x_QD.index_select(0, order_Q), received_RL.sum(0))
        place_Q = torch.empty_like(order_Q).scatter_(
            0, order_Q, torch.arange(len(order_Q), device=order_Q.device)
        )
        out_QD = out_QD.index_select(0, place_Q)
        return _Exchange.apply(out_QD, num_received, num_sent, self._group)

    def shard_placement(self, weight: nn.Parameter, num_shards: int) -> Shard:
        """The dimension FSDP shards: experts if they divide evenly."""
        assert isinstance(weight, DTensor), "the weights are DTensors from the beginning"
        if weight.to_local().shape[0] % num_shards == 0:
            return Shard(0)
        name = next(name for name, own in self.named_parameters() if own is weight)
        if name in _MODEL_DIM:
            return Shard(_MODEL_DIM[name])
        return self._adapter_placement(name, weight, num_shards)

    def _adapter_placement(self, name: str, weight: DTensor, num_shards: int) -> Shard:
        """Of `adapters.w1.lora_A`: the model dim if it has one, else its rank."""
        _, of, matrix = name.split(".")
        rank_dim = 1 if matrix == "lora_A" else 2
        has_model_dim = (of == "w2") == (matrix == "lora_B")
        dim = 3 - rank_dim if has_model_dim else rank_dim
        if weight.shape[dim] % num_shards:
            raise ValueError(
                f"lora_rank: {weight.shape[rank_dim]} cannot be cut over {num_shards} ranks, as "
                f"adapters of {len(weight)} experts need here: use a multiple of {num_shards}"
            )
        return Shard(dim)


class WholeTokens(ParallelStyle):
    """A feed-forward whose experts are sharded over tp: gathers the tokens of all tp ranks, and
    reduce-scatters the partial sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            x_TD = DTensor.from_local(inputs[0], device_mesh, [Shard(0)], run_check=False)
            whole_TD = x_TD.redistribute(placements=[Replicate()])
            return whole_TD.to_local(grad_placements=[Partial()])

        def scatter(_: nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            out_TD = DTensor.from_local(out, device_mesh, [Partial()], run_check=False)
            return out_TD.redistribute(placements=[Shard(0)]).to_local()

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


def _by_expert(received_RL: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[Q] permutation of rows from (rank, expert) order to expert order."""
    num_ranks, num_experts = received_RL.shape
    experts_RL = torch.arange(num_experts, device=received_RL.device).expand(num_ranks, -1)
    experts_Q = experts_RL.flatten().repeat_interleave(received_RL.flatten(), output_size=num_rows)
    return experts_Q.argsort(stable=True)


class _Exchange(torch.autograd.Function):
    """All-to-all: the first `num_sent[0]` rows go to rank 0, and so on; the result likewise."""

    @staticmethod
    def forward(
        ctx,
        x_SD: torch.Tensor,
        num_sent: list[int],
        num_received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.numbers, ctx.group = (num_sent, num_received), group
        return _exchange(x_SD, num_sent, num_received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_QD: torch.Tensor):
        num_sent, num_received = ctx.numbers
        return _exchange(grad_QD, num_received, num_sent, ctx.group), None, None, None


def _exchange(
    x_SD: torch.Tensor, num_sent: list[int], num_received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out_QD = x_SD.new_empty(sum(num_received), *x_SD.shape[1:])
    dist.all_to_all_single(out_QD, x_SD.contiguous(), num_received, num_sent, group=group)
    return out_QD
