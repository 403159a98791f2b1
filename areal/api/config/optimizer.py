"""The `optimizer` section of a training engine: the update rule and its learning-rate schedule."""

from __future__ import annotations

from typing import Literal

from areal.api.config.checks import require, require_above, require_at_least, require_fraction
from areal.api.config.section import config_section


@config_section
class OptimizerConfig:
    """AdamW or SGD. The schedule counts global steps, not minibatches."""

    type: Literal["adam", "sgd"] = "adam"
    """`adam` is AdamW: weight decay is decoupled from the gradient."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    weight_decay: float = 0.01
    """Shrinks every weight matrix by lr * weight_decay a step."""
    beta1: float = 0.9
    """Decay of Adam's running mean of gradients; SGD's momentum."""
    beta2: float = 0.999
    """Decay of Adam's running mean of squared gradients."""
    eps: float = 1e-8
    """Keeps Adam's division finite."""
    min_lr_ratio: float = 0.0
    """The schedule ends at lr * min_lr_ratio."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    warmup_steps_proportion: float = 0.001
    """Share of the training spent raising the learning rate from 0."""
    warmup_steps: int | None = None
    """The same in steps; when set it replaces `warmup_steps_proportion`."""
    gradient_clipping: float = 1.0
    """Largest norm of the whole gradient."""

    def __post_init__(self) -> None:
        require_above(0, lr=self.lr, eps=self.eps, gradient_clipping=self.gradient_clipping)
        require_at_least(0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        require(0 <= self.beta1 < 1, "beta1 must lie in [0, 1)", self.beta1)
        require(0 <= self.beta2 < 1, "beta2 must lie in [0, 1)", self.beta2)
        require_fraction(
            min_lr_ratio=self.min_lr_ratio, warmup_steps_proportion=self.warmup_steps_proportion
        )
