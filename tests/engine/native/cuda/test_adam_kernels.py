"""AdamW in one pass against torch's: masters, the rounded model, moments, clipping, skips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from areal.api.config.train_engine import OptimizerConfig
from areal.engine.train.optimizer import MasterOptimizer

_CONFIG = OptimizerConfig(
    lr=3e-3, weight_decay=0.1, gradient_clipping=1.0, warmup_steps_proportion=0.0
)


class Toy(nn.Module):
    """Weights with and without decay, no multiple of a block, and one that is its own master."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(device, dtype))

        self.matrix, self.bias, self.norm = weight(67, 33), weight(5), weight(3, dtype=torch.float)


class InOnePass(MasterOptimizer):
    def _uses_kernels(self) -> bool:
        return True


class ByTorch(MasterOptimizer):
    def _uses_kernels(self) -> bool:
        return False


def backward(model: Toy, optimizer: MasterOptimizer, factor: float, *, num_micro_batches: int):
    generator = torch.Generator().manual_seed(int(factor * 1000))
    for _ in range(num_micro_batches):
        for weight in model.parameters():
            grad = torch.randn(weight.shape, generator=generator) * factor
            grad = grad.to(weight.device, weight.dtype)
            weight.grad = grad if weight.grad is None else weight.grad + grad
        optimizer.collect_gradients()


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_one_pass_computes_what_torch_computes(device, num_micro_batches):
    found, wanted = Toy(device), Toy(device)
    optimizers = [InOnePass(found, _CONFIG, 10), ByTorch(wanted, _CONFIG, 10)]
    for factor in (0.001, 5.0, 0.02):  # the second is clipped
        stats = []
        for model, optimizer in zip((found, wanted), optimizers, strict=True):
            backward(model, optimizer, factor, num_micro_batches=num_micro_batches)
            stats.append(optimizer.step())
        assert stats[0] == pytest.approx(stats[1])
    one, other = optimizers
    torch.testing.assert_close(one.masters(), other.masters(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.moments(), other.moments(), rtol=1e-5, atol=1e-7)
    for name, weight in found.named_parameters():
        assert torch.equal(weight, one.masters()[name].to(weight.dtype)), name


def test_a_gradient_that_is_not_finite_changes_nothing(device):
    model = Toy(device)
    optimizer = InOnePass(model, _CONFIG, 10)
    backward(model, optimizer, 1.0, num_micro_batches=1)
    optimizer.step()
    before = [x.clone() for x in _all_numbers(model, optimizer)]
    for bad in (math.nan, math.inf):
        backward(model, optimizer, 1.0, num_micro_batches=1)
        optimizer._grads["bias"][0] = bad
        assert optimizer.step()["update_successful"] == 0.0
        assert all(map(torch.equal, _all_numbers(model, optimizer), before))
    assert optimizer.num_skipped_steps == 2


def test_a_step_without_a_gradient_changes_nothing(device):
    model = Toy(device)
    optimizer = InOnePass(model, _CONFIG, 10)
    before = [x.clone() for x in _all_numbers(model, optimizer)]
    assert optimizer.step()["grad_norm"] == 0.0
    assert all(map(torch.equal, _all_numbers(model, optimizer), before))


def _all_numbers(model: Toy, optimizer: MasterOptimizer) -> list[torch.Tensor]:
    moments = [x for state in optimizer.moments().values() for x in state.values()]
    return [*model.parameters(), *optimizer.masters().values(), *moments]


def test_a_gpu_updates_in_one_pass(device):
    """And a CPU by torch."""
    optimizer = MasterOptimizer(Toy(device), _CONFIG, 10)
    assert optimizer._uses_kernels() == (device.type == "cuda")
