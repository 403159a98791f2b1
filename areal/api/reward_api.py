"""Public import of `areal.sandbox.pool`: reward functions in confined processes."""

from areal.sandbox.pool import (
    AsyncRewardWrapper,
    RewardCrashError,
    RewardError,
    RewardTimeoutError,
)

__all__ = ["AsyncRewardWrapper", "RewardCrashError", "RewardError", "RewardTimeoutError"]
