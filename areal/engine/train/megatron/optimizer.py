"""megatron-core's distributed optimizer: gradient buffers, sharded float32 masters, the update.

Masters and moments are sharded over data-parallel ranks; gradients are summed over ranks in
float32. If a gradient is not finite, all ranks skip the step and the weights stay unchanged. The
interface is that of `engine/train/optimizer.py`, so that both use one checkpoint code; a checkpoint
can only be loaded by the layout that wrote it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer import (
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer

from areal.api.config.train_engine import OptimizerConfig
from areal.engine.train.megatron.model import MegatronStage
from areal.engine.train.megatron.weights import part_names
from areal.engine.train.optimizer import SkippingOptimizer, scheduled_lr


class ShardedOptimizer(SkippingOptimizer):
    """Trains `models`, the wrapped stages to pass to the schedule. All ranks call."""

    def __init__(
        self, stages: list[MegatronStage], config: OptimizerConfig, total_steps: int
    ) -> None:
        super().__init__()
        self._stages = stages
        self._config = config
        self._total_steps = total_steps
        transformer = stages[0].config  # shared by all stages
        transformer.finalize_model_grads_func = _sum_gradients
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self.models = [DistributedDataParallel(transformer, ddp, stage) for stage in stages]
        theirs = _megatron_config(config, transformer.params_dtype)
        optimizer = get_megatron_optimizer(
            theirs,
            [*self.models],
            config_overrides=get_standard_config_overrides(theirs),
            use_gloo_process_groups=False,
        )
        assert isinstance(optimizer, ChainedOptimizer), "one for each kind of weights"
        self._optimizer = optimizer
        self._parts: list[Any] = optimizer.chained_optimizers  # typed as the base class only
        self._create_state()
        self.set_lr_step(0)

    @property
    def lr(self) -> float:
        return scheduled_lr(self._config, self.lr_step, self._total_steps)

    def set_lr_step(self, step: int) -> None:
        """Move the schedule to `step`, which counts global steps, not minibatches."""
        self.lr_step = step
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
            # 0 for norms and biases; megatron-core leaves it to the owner of the schedule.
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]

    def _clip_and_update(self) -> float:
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if math.isfinite(grad_norm):
            for part in self._parts:
                clip_grad_by_total_norm_fp32(
                    part.get_parameters(), self._config.gradient_clipping, grad_norm
                )
            self._optimizer.step_with_ready_grads()
        return grad_norm

    def forget_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def read_model(self) -> None:
        """Copy the model's weights, just loaded, into the masters."""
        self._optimizer.reload_model_params()

    def masters(self) -> dict[str, torch.Tensor]:
        """The model's weights and this rank's shards of the float32 masters, by name."""
        tensors = part_names(self._stages) | self._named_masters()
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The optimizer's tensors by master; loading into them in place restores it."""
        return {
            name: dict(inner.state[master])
            for inner, masters in self._masters_by_optimizer()
            for name, master in masters.items()
        }

    def write_back(self) -> None:
        """No-op: `masters` includes the rounded weights, so both have been loaded."""

    def _named_masters(self) -> dict[str, torch.Tensor]:
        return {
            name: master
            for _, masters in self._masters_by_optimizer()
            for name, master in masters.items()
        }

    def _masters_by_optimizer(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """torch's inner optimizers and their masters, named by rank and stages: equal shapes on
        another rank or stage are other weights."""
        found = []
        for number, part in enumerate(self._parts):
            if part.is_stub_optimizer:
                continue  # this rank has no weights of this group
            inner = part.optimizer
            if not isinstance(inner, torch.optim.AdamW):
                raise ValueError(
                    f"megatron-core has chosen {type(inner).__module__}.{type(inner).__name__}, "
                    "which areal cannot resume: remove TransformerEngine and apex from the "
                    "environment"
                )
            masters = [m for group in inner.param_groups for m in group["params"]]
            stages = f".{len(self._stages)}stages" if len(self._stages) > 1 else ""
            prefix = f"rank{dist.get_rank()}{stages}.optimizer{number}"
            found.append((inner, {f"{prefix}.{i}": m for i, m in enumerate(masters)}))
        return found

    @torch.no_grad()
    def _create_state(self) -> None:
        """Allocate the optimizer's state now, so that a resumed run can load into it."""
        for inner, masters in self._masters_by_optimizer():
            for group in inner.param_groups:
                group["lr"] = 0.0
            for master in masters.values():
                master.grad = torch.zeros_like(master)
            inner.step()
            inner.zero_grad(set_to_none=True)
            for state in inner.state.values():
                for tensor in state.values():
                    tensor.zero_()


def _sum_gradients(models: list, num_tokens: torch.Tensor, **options: Any) -> None:
    """Sum over data, context and tensor ranks and shared embeddings, without a division."""
    finalize_model_grads(models, None, **options)


def _megatron_config(config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer=config.type,
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.gradient_clipping,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
