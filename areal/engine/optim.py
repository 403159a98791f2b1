"""The optimizer of one rank: float32 master weights, AdamW or SGD, clipping, the schedule.

    gradients of the model -> `collect_gradients` after each micro-batch -> `step` once per batch

A model in bfloat16 is a rounded copy of its float32 masters, so that small updates are not lost
and training computes with exactly the numbers inference gets. A float32 model is its own master.
A gradient that is not finite is thrown away: the weights and the optimizer stay as they were.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from areal.api.config.optimizer import OptimizerConfig
from areal.utils import logging

logger = logging.getLogger("Optimizer")


def lr_factor(
    step: int, *, kind: str, total_steps: int, warmup_steps: int, min_lr_ratio: float
) -> float:
    """What the learning rate is multiplied with at `step` (from 0). No step has a rate of 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if kind == "linear":
        fall = 1.0 - progress
    elif kind == "cosine":
        fall = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"lr_scheduler_type must be constant, linear or cosine, got {kind!r}")
    return min_lr_ratio + (1.0 - min_lr_ratio) * fall


class MasterOptimizer:
    """Updates `model` in place."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.num_skipped_steps = 0
        self.lr_step = 0
        self._config = config
        self._total_steps = total_steps
        self._weights = dict(model.named_parameters())
        self._masters = {name: _master_of(weight) for name, weight in self._weights.items()}
        self._optimizer = _build(config, list(self._masters.values()))
        self._create_state()
        self.set_lr_step(0)

    @property
    def lr(self) -> float:
        return self._optimizer.param_groups[0]["lr"]

    def set_lr_step(self, step: int) -> None:
        """Go to place `step` of the schedule; it counts global steps, not minibatches."""
        config = self._config
        warmup_steps = config.warmup_steps
        if warmup_steps is None:
            warmup_steps = int(config.warmup_steps_proportion * self._total_steps)
        factor = lr_factor(
            step,
            kind=config.lr_scheduler_type,
            total_steps=self._total_steps,
            warmup_steps=warmup_steps,
            min_lr_ratio=config.min_lr_ratio,
        )
        self.lr_step = step
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * factor

    def collect_gradients(self) -> None:
        """Add the model's gradients to the masters'; sums over micro-batches are in float32."""
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is weight or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update, forget the gradients; reports update_successful, grad_norm and lr."""
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = get_total_norm(grads)
        grad_norm = norm.item()
        successful = math.isfinite(grad_norm)
        if successful:
            clip_grads_with_norm_(self._masters.values(), self._config.gradient_clipping, norm)
            self._optimizer.step()
            self.write_back()
        else:
            self.num_skipped_steps += 1
            logger.warning(
                "gradient norm is %s: update skipped (%d so far)", grad_norm, self.num_skipped_steps
            )
        self._optimizer.zero_grad(set_to_none=True)
        return {"update_successful": float(successful), "grad_norm": grad_norm, "lr": self.lr}

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])

    @torch.no_grad()
    def read_model(self) -> None:
        """Take the model's weights, just loaded, as the masters."""
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                self._masters[name].copy_(weight)

    def masters(self) -> dict[str, torch.Tensor]:
        """The float32 weights by name; loading into these tensors is followed by `write_back`."""
        return {name: master.detach() for name, master in self._masters.items()}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The optimizer's tensors by weight name; loading into them in place restores it."""
        states = self._optimizer.state
        return {name: dict(states[master]) for name, master in self._masters.items()}

    def _create_state(self) -> None:
        """Make the optimizer's tensors now, so that a resumed run has a place to load them."""
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for state in self._optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()


def _master_of(weight: nn.Parameter) -> nn.Parameter:
    if weight.dtype == torch.float32:
        return weight
    return nn.Parameter(weight.detach().float())


def _build(config: OptimizerConfig, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Norms and biases are not decayed: pulling a scale of 1 to 0 is no regularisation.
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.type == "adam":
        return torch.optim.AdamW(
            groups, config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
    return torch.optim.SGD(groups, config.lr, momentum=config.beta1)
