"""Reward functions: `fn(prompt, completions, prompt_ids, completion_ids, **data) -> float`.

They are plain and synchronous; `AsyncRewardWrapper` runs them in worker processes. `data` is the
row of the data set. A function raises if it cannot judge; it returns 0 only for a wrong answer.

The shipped functions can be imported from here (`from areal.reward import gsm8k_reward_fn`) and are
loaded on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from areal.api.reward_api import AsyncRewardWrapper
from areal.utils import import_path
from areal.utils.import_path import Call, signature_of

# Names for `reward_fn` in the YAML. Other functions are given by import path.
REWARD_FNS = {
    "clevr_count_70k": "areal.reward.clevr_count_70k.clevr_count_70k_reward_fn",
    "countdown": "areal.reward.countdown.countdown_reward_fn",
    "geometry3k": "areal.reward.geometry3k.geometry3k_reward_fn",
    "gsm8k": "areal.reward.gsm8k.gsm8k_reward_fn",
    "llm_judge": "areal.reward.llm_judge.llm_judge_reward_fn",
    "math_verify": "areal.reward.math_verify.math_verify_reward_fn",
    "reward_model": "areal.reward.reward_model.reward_model_reward_fn",
    "unit_tests": "areal.reward.unit_tests.unit_tests_reward_fn",
}
VALID_REWARD_FN = list(REWARD_FNS)
_HOMES = {path.rpartition(".")[2]: path.rpartition(".")[0] for path in REWARD_FNS.values()}
_HOMES["get_math_verify_worker"] = "areal.reward.math_verify"
_HOMES["LLMJudge"] = "areal.reward.llm_judge"
_HOMES["RewardModel"] = "areal.reward.reward_model"
__all__ = [
    "REWARD_CALL",
    "REWARD_FNS",
    "VALID_REWARD_FN",
    "AsyncRewardWrapper",
    "check_reward_fn",
    "get_reward_fn",
]


REWARD_CALL = Call(
    "fn(prompt, completions, prompt_ids, completion_ids, **data) -> float",
    4,
    None,
    "a reward gets one prompt and one completion, as text and as token ids, and the columns of the "
    "row as keywords; a function that scores lists of them, as for TRL, needs a wrapper",
)


def get_reward_fn(name: str, *, key: str = "reward_fn") -> Callable[..., float]:
    """The function of a name or an import path; errors name the config key `key`."""
    found = import_path.load_named(name, REWARD_FNS, key=key)
    check_reward_fn(found, f"{key}: {name}")
    return found


def check_reward_fn(fn: Callable[..., float], what: str = "reward_fn") -> None:
    """ValueError, starting with `what`, if the function cannot be called as a reward function."""
    REWARD_CALL.require(signature_of(fn), what)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.reward' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
