"""What a step generates and trains on: prompts, samples, and a distribution of output lengths.

Configs say how long an output may be, not how long it is: outputs are log-normal around a mean, cut
at the bound. `--output-tokens` and `--length-spread` say it better than the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

from areal.api.config.experiment import PPOConfig

_DEFAULT_PROMPT = 256
_DEFAULT_SPREAD = 0.5
_GRID = 256  # quantiles between which a drawn length lies


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    prompts: int  # of a step
    samples: int  # of a prompt
    prompt: int  # tokens
    image: int = 0  # of these, tokens of images
    output: float  # tokens, on average
    max_output: int
    spread: float = _DEFAULT_SPREAD  # standard deviation of the logarithm of an output's length
    staleness: int = 0  # max_head_offpolicyness
    max_concurrent: int = 0  # prompts in flight; 0: as many as staleness allows
    environment_s: float = 0.0  # that an episode waits, on average; from 0.4 to 1.6 times as long
    steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "prompt", "max_output"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.image <= self.prompt:
            raise ValueError(
                f"--image-tokens must be from 0 to the {self.prompt} tokens of a prompt, got "
                f"{self.image}; --prompt-tokens counts them, too"
            )
        if not 0 < self.output <= self.max_output:
            raise ValueError(
                f"--output-tokens must be from 1 to the {self.max_output} of "
                f"gconfig.max_new_tokens, got {self.output:g}"
            )
        if not 0 <= self.spread <= 3:
            raise ValueError(f"--length-spread must lie between 0 and 3, got {self.spread:g}")
        if not 0 <= self.environment_s < math.inf:
            raise ValueError(f"--environment-seconds must be 0 or more, got {self.environment_s:g}")

    @property
    def num_samples(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """That a step trains on, prompts included."""
        return self.num_samples * (self.prompt + self.output)

    def distinct_prompts(self, num_samples: float) -> float:
        """Of so many samples of a step, drawn by chance. Samples of a prompt share its images."""
        share = min(num_samples / self.num_samples, 1.0)
        return max(self.prompts * (1 - (1 - share) ** self.samples), min(num_samples, 1.0))

    @property
    def in_flight(self) -> int:
        """Most prompts in flight."""
        most = (self.staleness + 1) * self.prompts
        return min(self.max_concurrent or most, most)

    @property
    def longest_environment_s(self) -> float:
        return 1.6 * self.environment_s

    def outputs(self, count: int) -> list[int]:
        """`count` lengths, evenly spaced quantiles of the distribution, with its mean."""
        return list(_quantiles(self.output, self.max_output, self.spread, count))

    def draw(self, uniform: float) -> int:
        """One length, from a number in (0, 1)."""
        grid = _quantiles(self.output, self.max_output, self.spread, _GRID)
        place = min(max(uniform, 0.0), 1.0) * (len(grid) - 1)
        low = int(place)
        high = min(low + 1, len(grid) - 1)
        return max(1, round(grid[low] + (place - low) * (grid[high] - grid[low])))


@cache
def _quantiles(output: float, max_output: int, spread: float, count: int) -> tuple[int, ...]:
    if spread == 0:
        return (round(output),) * count
    normal = NormalDist()
    raw = [math.exp(spread * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    return tuple(_scaled(raw, output, max_output))


def _scaled(raw: list[float], mean: float, most: int) -> list[int]:
    """Multiplied by a factor that gives them the mean, although long ones are cut."""
    low, high = 0.0, most / min(raw)
    for _ in range(60):
        factor = (low + high) / 2
        found = sum(min(factor * x, most) for x in raw) / len(raw)
        low, high = (factor, high) if found < mean else (low, factor)
    return [max(1, round(min(low * x, most))) for x in raw]


def workload_of(config: PPOConfig, given: Mapping[str, Any]) -> tuple[Workload, list[str]]:
    """The workload of a config, and what had to be assumed. `given` are values by field."""
    gconfig, rollout = config.gconfig, config.rollout
    assumed: list[str] = []

    def value(name: str, default: Any, text: str) -> Any:
        if given.get(name) is not None:
            return given[name]
        assumed.append(text)
        return default

    longest = config.train_dataset.max_length
    prompt = longest // 2 if longest else _DEFAULT_PROMPT
    workload = Workload(
        prompts=config.train_dataset.batch_size,
        samples=gconfig.n_samples,
        prompt=value("prompt", max(prompt, 1), f"prompts of {max(prompt, 1)} tokens"),
        image=given.get("image") or 0,
        output=value(
            "output",
            max(gconfig.max_new_tokens / 2, 1),
            f"outputs of {max(gconfig.max_new_tokens / 2, 1):g} tokens on average, half of "
            "gconfig.max_new_tokens",
        ),
        max_output=gconfig.max_new_tokens,
        spread=_DEFAULT_SPREAD if given.get("spread") is None else given["spread"],
        staleness=rollout.max_head_offpolicyness,
        max_concurrent=rollout.max_concurrent_rollouts or 0,
        environment_s=given.get("environment_s") or 0.0,
        steps=given.get("steps") or config.max_train_steps,
    )
    return workload, assumed
