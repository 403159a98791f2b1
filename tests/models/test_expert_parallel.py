"""Rows that travel to their experts: their order by hand, and that nothing is lost on the way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_config
from torch.distributed.device_mesh import init_device_mesh

from areal.models import get_model_spec
from areal.models.common.moe import Experts
from areal.models.expert_parallel import SpreadExperts, _by_expert


@pytest.mark.parametrize(
    ("received", "order"),
    [
        ([[1, 2], [2, 0]], [0, 3, 4, 1, 2]),
        ([[0, 2], [0, 1]], [0, 1, 2]),
        ([[0, 0], [0, 0]], []),
        ([[0, 1, 1], [2, 1, 0]], [2, 3, 0, 4, 1]),
    ],
)
def test_rows_by_rank_become_rows_by_expert(received, order):
    received_RL = torch.tensor(received)
    assert _by_expert(received_RL, int(received_RL.sum())).tolist() == order


@pytest.fixture
def join_nobody():
    """A process group of this process alone."""
    if dist.is_initialized():
        yield
        return
    kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 5, 0, 0], [1, 0, 160, 17]])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_one_rank_of_spread_experts_is_experts(join_nobody, counts, device, dtype):
    config = tiny_config("qwen3_moe", hidden_size=64, moe_intermediate_size=48)
    args = get_model_spec("qwen3_moe").model_args_class.from_hf_config(config)
    mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("ep", "etp"))
    torch.manual_seed(0)
    with torch.device(device):
        experts = Experts(args).to(dtype)
        for weight in experts.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        spread = SpreadExperts(args, mesh).to(dtype)
        x_SD = torch.randn(sum(counts), 64, dtype=dtype, requires_grad=True)
        grad_SD, counts_E = torch.randn_like(x_SD), torch.tensor(counts)
    for own, whole in zip(spread.weights(), experts.weights(), strict=True):
        own.detach().copy_(whole.detach())
    expected, got = experts(x_SD, counts_E), spread(x_SD, counts_E)
    assert torch.equal(got, expected)
    got_x, *got_grads = torch.autograd.grad(got, [x_SD, *spread.parameters()], grad_SD)
    expected_grads = torch.autograd.grad(expected, [x_SD, *experts.parameters()], grad_SD)
    all_got = [got_x, *(grad.to_local() for grad in got_grads)]
    assert all(map(torch.equal, all_got, expected_grads))
