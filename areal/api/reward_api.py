"""Public door to reward functions in confined processes, which `areal.sandbox.pool` runs."""

from areal.sandbox.pool import (
    AsyncRewardWrapper,
    RewardCrashError,
    RewardError,
    RewardTimeoutError,
)

__all__ = ["AsyncRewardWrapper", "RewardCrashError", "RewardError", "RewardTimeoutError"]
