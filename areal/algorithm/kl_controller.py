"""A KL coefficient that follows a target instead of being guessed.

    controller = AdaptiveKlController(0.1, target=6.0, horizon=10_000)
    rewards = kl_rewards(..., kl_ctl=controller.value)
    controller.update(mean_kl, num_samples)     # once per step

More divergence than the target raises the coefficient, less lowers it, by at most 20 % of
num_samples / horizon at a time, so that a new batch never shocks the run (proportional control in
log space, as in "Fine-Tuning Language Models from Human Preferences"). Part of a recover point.
"""

from __future__ import annotations

import math

MAX_RELATIVE_ERROR = 0.2


class AdaptiveKlController:
    def __init__(self, init_value: float, *, target: float, horizon: float) -> None:
        for name, number in (("init_value", init_value), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"adaptive KL: {name} must be above 0, got {number}")
        self.value = init_value
        self.target = target
        self.horizon = horizon

    def update(self, mean_kl: float, num_samples: int) -> None:
        """`mean_kl` is the KL of the last batch in the unit of `target`."""
        if not math.isfinite(mean_kl):
            raise ValueError(f"adaptive KL: the measured KL must be finite, got {mean_kl}")
        error = mean_kl / self.target - 1
        error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        # A batch of more samples than the horizon must not turn the factor negative.
        self.value *= 1 + error * min(num_samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
