"""The optimizer: float32 master weights, AdamW or SGD, clipping, the schedule.

    gradients of the model -> `collect_gradients` after each micro-batch -> `step` once per batch

A model in bfloat16 is a rounded copy of its float32 masters, so that small updates are not lost
and training computes with exactly the numbers inference gets. A float32 model is its own master,
and so is a sharded model (DTensors): each rank updates its local shards, and only the norm is
reduced over ranks. If the gradient of any rank is not finite, all ranks skip the step: weights and
optimizer stay unchanged.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from areal.api.config.train_engine import OptimizerConfig
from areal.models.parallelize import local_part
from areal.utils import logging

logger = logging.getLogger("Optimizer")


def lr_factor(
    step: int, *, kind: str, total_steps: int, warmup_steps: int, min_lr_ratio: float
) -> float:
    """Factor on the learning rate at `step` (from 0); never 0."""
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


def scheduled_lr(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate at step `step` of the schedule."""
    warmup_steps = config.warmup_steps
    if warmup_steps is None:
        warmup_steps = int(config.warmup_steps_proportion * total_steps)
    return config.lr * lr_factor(
        step,
        kind=config.lr_scheduler_type,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        min_lr_ratio=config.min_lr_ratio,
    )


class SkippingOptimizer(ABC):
    """A step leaves out an update whose gradient norm is not finite, and counts it."""

    def __init__(self) -> None:
        self.num_skipped_steps = 0
        self.lr_step = 0

    @property
    @abstractmethod
    def lr(self) -> float: ...

    @abstractmethod
    def forget_gradients(self) -> None: ...

    @abstractmethod
    def _clip_and_update(self) -> float:
        """The norm of the gradients; nothing has changed if it is not finite."""

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update, clear the gradients; reports update_successful, grad_norm and lr."""
        grad_norm = self._clip_and_update()
        successful = math.isfinite(grad_norm)
        if not successful:
            self.num_skipped_steps += 1
            logger.warning(
                "gradient norm is %s: update skipped (%d so far)", grad_norm, self.num_skipped_steps
            )
        self.forget_gradients()
        return {"update_successful": float(successful), "grad_norm": grad_norm, "lr": self.lr}


class MasterOptimizer(SkippingOptimizer):
    """Updates the trainable weights of `model` in place. All of `ranks`, which hold shards, call.

    In a pipeline of `num_stages` ranks, weights of other ranks' stages are on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        ranks: dist.ProcessGroup | None = None,
        num_stages: int = 1,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self._num_stages = num_stages
        self._config = config
        self._total_steps = total_steps
        self._weights = {
            name: weight
            for name, weight in model.named_parameters()
            if weight.requires_grad and not weight.is_meta
        }
        assert ranks is not None or all(_num_shards(w) == 1 for w in self._weights.values())
        self._masters = {name: _master_of(weight) for name, weight in self._weights.items()}
        self._grads: dict[str, torch.Tensor] = {}  # of the masters, or as backward left them
        self._optimizer = _build(config, list(self._masters.values()))
        self._moments = self._create_state()
        self.set_lr_step(0)

    @property
    def lr(self) -> float:
        return self._optimizer.param_groups[0]["lr"]

    def set_lr_step(self, step: int) -> None:
        """Move the schedule to `step`, which counts global steps, not minibatches."""
        self.lr_step = step
        for group in self._optimizer.param_groups:
            group["lr"] = scheduled_lr(self._config, step, self._total_steps)

    def collect_gradients(self) -> None:
        """Take the model's gradients; sums over micro-batches are in float32."""
        for name, weight in self._weights.items():
            if not self._is_copy(name) or weight.grad is None:
                continue  # FSDP already sums gradients of shards in float32
            held = self._grads.get(name)
            if held is None:
                self._grads[name] = weight.grad
            elif held.dtype == torch.float32:
                held += weight.grad
            else:
                self._grads[name] = held.float().add_(weight.grad)
            weight.grad = None

    def _clip_and_update(self) -> float:
        self._take_shards()
        norm = self._gradient_norm()
        if self._uses_kernels():
            self._update_by_kernels(norm)  # changes nothing if the norm is not finite
            return norm.item()
        grad_norm = norm.item()
        if math.isfinite(grad_norm):
            self._update(norm, grad_norm)
        return grad_norm

    def forget_gradients(self) -> None:
        for weight in self._weights.values():
            weight.grad = None
        self._grads.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def _take_shards(self) -> None:
        """Point the masters at the local shards of the DTensors, and take what gradients the
        weights still hold."""
        for name, weight in self._weights.items():
            grad = weight.grad
            if isinstance(weight, DTensor):
                # In each step: FSDP may move a shard to padded storage when it first runs.
                self._masters[name].data = weight.to_local()
            if grad is not None and not self._is_copy(name):
                self._grads[name] = local_part(grad)

    def _gradient_norm(self) -> torch.Tensor:
        """Norm over the whole model; replicated elements count once."""
        if self._ranks is None:
            return _total_norm(list(self._grads.values()))
        grads_by_copies: dict[int, list[torch.Tensor]] = {}
        for name, grad in self._grads.items():
            copies = self._ranks.size() // (self._num_stages * _num_shards(self._weights[name]))
            grads_by_copies.setdefault(copies, []).append(grad)
        # In float64, where the square of no float32 norm overflows.
        parts = [_total_norm(g).double() ** 2 / n for n, g in grads_by_copies.items()]
        total = torch.stack(parts).sum()
        dist.all_reduce(total, group=self._ranks)
        return total.sqrt().float()

    def _update(self, norm: torch.Tensor, grad_norm: float) -> None:
        for name, grad in self._grads.items():
            self._masters[name].grad = grad.float()
        if grad_norm + 1e-6 > self._config.gradient_clipping:
            factor = (self._config.gradient_clipping / (norm + 1e-6)).clamp(max=1.0)
            grads = [m.grad for m in self._masters.values() if m.grad is not None]
            torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]  # no public one
        self._optimizer.step()
        self.write_back()

    def _uses_kernels(self) -> bool:
        masters = self._masters.values()
        return self._config.type == "adam" and all(m.is_cuda and m.is_contiguous() for m in masters)

    def _update_by_kernels(self, norm: torch.Tensor) -> None:
        """The same in one pass. The host waits for nothing: the norm stays on the device."""
        from areal.engine.train import adam_kernels  # needs Triton

        if not self._grads:
            return
        config, states = self._config, self._optimizer.state
        steps = [states[self._masters[name]]["step"] for name in self._grads]
        # A list, as one tensor would be read by the host.
        torch._foreach_add_(steps, [norm.isfinite().float()] * len(steps))  # pyright: ignore[reportPrivateImportUsage]  # likewise
        for name, grad in self._grads.items():
            master = self._masters[name]
            adam_kernels.update(
                adam_kernels.AdamState(
                    master,
                    self._weights[name] if self._is_copy(name) else None,
                    grad=grad.contiguous(),
                    **states[master],
                ),
                norm,
                lr=self.lr,
                weight_decay=config.weight_decay if _is_decayed(master) else 0.0,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                max_norm=config.gradient_clipping,
            )

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        _copy_all(
            [(w, self._masters[name]) for name, w in self._weights.items() if self._is_copy(name)]
        )

    @torch.no_grad()
    def read_model(self) -> None:
        """Copy the model's weights, just loaded, into the masters."""
        for name, weight in self._weights.items():
            if self._is_copy(name):
                self._masters[name].copy_(weight)

    @torch.no_grad()
    def follow_model(self, device: torch.device | str) -> None:
        """Move to `device`, where the model has just been moved; not between backward and step."""
        self._take_shards()
        for name in self._weights:
            master, moments = self._masters[name], self._moments[name]
            if self._is_copy(name):
                master.data = master.data.to(device)
            state = self._optimizer.state[master]
            for key, tensor in moments.items():
                moved = moments[key] = tensor.to(device, copy=True)
                state[key] = local_part(moved)

    def masters(self) -> dict[str, torch.Tensor]:
        """The float32 weights by name; loading into these tensors is followed by `write_back`."""
        return {
            name: (self._masters[name] if self._is_copy(name) else weight).detach()
            for name, weight in self._weights.items()
        }

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The optimizer's tensors by weight name; loading into them in place restores it."""
        return {name: dict(moments) for name, moments in self._moments.items()}

    def _is_copy(self, name: str) -> bool:
        """Whether the model's weight is a rounded copy of the master."""
        weight = self._weights[name]
        return self._masters[name] is not weight and not isinstance(weight, DTensor)

    @torch.no_grad()
    def _create_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Allocate the optimizer's state now, so that a resumed run can load into it.

        Returns the tensors by name, sharded ones as DTensors.
        """
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        moments = {}
        for name, weight in self._weights.items():
            state = self._optimizer.state[self._masters[name]]
            for tensor in state.values():
                tensor.zero_()
            moments[name] = dict(state)
            if isinstance(weight, DTensor):
                whole = {key: torch.zeros_like(weight) for key, x in state.items() if x.ndim}
                state.update({key: local_part(dtensor) for key, dtensor in whole.items()})
                moments[name] |= whole
        return moments


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first with rounding, in few kernels."""
    if pairs:
        targets, sources = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]  # likewise


def _total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """In float32, whatever the gradients are."""
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]  # likewise
    return torch.linalg.vector_norm(torch.stack(norms))


def _master_of(weight: nn.Parameter) -> nn.Parameter:
    if isinstance(weight, DTensor):
        assert weight.dtype == torch.float32, "shards are float32; FSDP rounds what it gathers"
        return nn.Parameter(local_part(weight.detach()))
    if weight.dtype == torch.float32:
        return weight
    return nn.Parameter(weight.detach().float())


def _num_shards(weight: torch.Tensor) -> int:
    """Number of distinct shards of the weight."""
    if not isinstance(weight, DTensor):
        return 1
    sizes = weight.device_mesh.shape
    return math.prod(
        size
        for size, place in zip(sizes, weight.placements, strict=True)
        if not place.is_replicate()
    )


def _is_decayed(master: torch.Tensor) -> bool:
    """Norms and biases are not: pulling a scale of 1 to 0 is no regularisation."""
    return master.ndim >= 2


def _build(config: OptimizerConfig, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [m for m in masters if _is_decayed(m)], "weight_decay": config.weight_decay},
        {"params": [m for m in masters if not _is_decayed(m)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.type == "adam":
        return torch.optim.AdamW(
            groups, config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
    return torch.optim.SGD(groups, config.lr, momentum=config.beta1)
