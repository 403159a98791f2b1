"""What an inference server may answer: one check of generated tokens for every back end.

A reply that breaks a rule cannot be trained on, so it is refused, never repaired: the client counts
it, sends the request again within its bound, and then raises an error that names the server.

| rule                                      | why                                                  |
|-------------------------------------------|------------------------------------------------------|
| one log-probability per token             | there is none to train with otherwise                |
| numbers: no booleans, strings or null     | JSON's true is a 1 to Python                         |
| -1000 <= log-probability <= 0.001         | above 0 only by rounding; no sampler draws a token   |
|                                           | of probability e**-1000; vLLM says -9999 for -inf    |
| token ids of the vocabulary               |                                                      |
| at most as many tokens as asked for       |                                                      |
| at least one token, unless aborted        | a stop token is a token too                          |
| versions that were sent, and none that    | weights only move forward while one server           |
| goes back within one server's output      | generates                                            |

Errors are ValueErrors that begin with the name of the field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.api.json_text import Json

MAX_LOGPROB = 1e-3  # float rounding of a probability of 1
MIN_SAMPLED_LOGPROB = -1000.0
_VERSION_END = 1 << 31  # trajectories store int32
_TOKEN_END = 1 << 63


def check_tokens(tokens: Any, *, vocab_size: int | None = None) -> None:
    """Of any length. Checked by type and extremes, not one by one: outputs are long."""
    end = _TOKEN_END if vocab_size is None else vocab_size
    if not _is_list_of(tokens, {int}):
        raise ValueError(f"output_tokens: expected a list of token ids, got {_shown(tokens)}")
    if tokens and not (min(tokens) >= 0 and max(tokens) < end):
        raise ValueError(
            f"output_tokens: token ids must lie in 0 .. {end - 1}, got {_shown(min(tokens))} .. "
            f"{_shown(max(tokens))}"
        )


def check_logprobs(logprobs: Any, *, low: float = MIN_SAMPLED_LOGPROB) -> None:
    if not _is_list_of(logprobs, {int, float}):
        raise ValueError(f"output_logprobs: expected a list of numbers, got {_shown(logprobs)}")
    # A comparison with NaN is false, whichever it is: so the extremes do not find it.
    if logprobs and not (_has_finite_sum(logprobs) and low <= min(logprobs)):
        wrong = next((p for p in logprobs if not low <= p < math.inf), None)
        if wrong is not None:
            raise ValueError(
                f"output_logprobs: expected finite numbers of at least {low:g}, got {_shown(wrong)}"
            )
    if logprobs and max(logprobs) > MAX_LOGPROB:
        raise ValueError(
            f"output_logprobs: a log-probability lies at or below 0 (rounding: {MAX_LOGPROB:g}), "
            f"got {_shown(max(logprobs))}"
        )


def check_lengths(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(tokens) != len(logprobs):
        raise ValueError(
            f"output_logprobs: expected one per output token, got {len(logprobs)} for {len(tokens)}"
        )


def check_amount(num_tokens: int, stop_reason: str | None, *, max_tokens: int) -> None:
    """`stop_reason` None: more may come."""
    if num_tokens > max_tokens:
        raise ValueError(f"output_tokens: {num_tokens} tokens came, {max_tokens} were asked for")
    if num_tokens == 0 and stop_reason in ("stop", "length"):
        raise ValueError(f"output_tokens: none came, though the request ended with {stop_reason!r}")


def check_versions(versions: Any, *, newest: int | None = None, first: int = 0) -> None:
    """Of one server's tokens in a row; `newest` was sent last, `first` is that of the token before
    them."""
    if not _is_list_of(versions, {int}):
        raise ValueError(f"output_versions: expected a list of integers, got {_shown(versions)}")
    end = _VERSION_END if newest is None else newest + 1
    if versions and not (min(versions) >= 0 and max(versions) < end):
        raise ValueError(
            f"output_versions: versions 0 .. {end - 1} exist, got {_shown(min(versions))} .. "
            f"{_shown(max(versions))}"
        )
    if versions and (versions[0] < first or sorted(versions) != versions):
        raise ValueError("output_versions: weights only move forward, got a version that goes back")


def _is_list_of(value: Json, kinds: set[type]) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= kinds


def _has_finite_sum(values: Sequence[float]) -> bool:
    """Then all are finite; they may be also if not."""
    try:
        return math.isfinite(sum(values))
    except OverflowError:  # an integer beyond all floats
        return False


def _shown(value: Json) -> str:
    if isinstance(value, int) and abs(value) >= _TOKEN_END:
        return "an integer beyond 64 bits"
    text = repr(value[:8] if isinstance(value, list | str) else value)
    return f"{text[:60]}..." if len(text) > 60 else text
