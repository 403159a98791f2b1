"""What an environment is, and the check of what one returns.

    class Parity:
        async def reset(self, row):
            self.number = row["seed"]
            return f"Is {self.number} even?"                    # the first observation

        async def step(self, action):
            is_right = action == ("no" if self.number % 2 else "yes")
            return "", float(is_right), True                    # observation, reward, done

An observation is a text (a user's turn), or a list of chat messages. Plain functions in place of
`async` ones run in a thread. Optional: `close`, and `tools`, functions that the model may call
between two steps (tools.py).

An exception, a time-out and a malformed result are failures of the episode, never data.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

Messages = list[dict[str, Any]]
Observation = str | Messages


class Environment(Protocol):
    """One episode. `reset` is called once, then `step` until it says `done`."""

    async def reset(self, row: dict[str, Any]) -> Observation: ...

    async def step(self, action: str) -> tuple[Observation | None, float, bool]: ...


class EnvError(RuntimeError):
    """An environment failed: an exception of its own, a time-out, or a malformed result."""


class Step(NamedTuple):
    messages: Messages  # empty if there is nothing to see
    reward: float
    done: bool


def messages_of(observation: Any, what: str) -> Messages:
    """The chat messages of an observation; `what` names its source in errors."""
    if observation is None or observation == "":
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and all(map(_is_message, observation)):
        return [dict(message) for message in observation]
    raise EnvError(
        f"{what} must return a text or a list of chat messages as observation, got "
        f"{observation!r:.200}"
    )


def checked_step(result: Any, what: str) -> Step:
    if not (isinstance(result, tuple) and len(result) == 3):
        raise EnvError(f"{what} must return (observation, reward, done), got {result!r:.200}")
    observation, reward, done = result
    if not _is_finite(reward):
        raise EnvError(f"{what} must return a finite reward, got {reward!r:.200}")
    if not isinstance(done, bool):
        raise EnvError(f"{what} must return done as True or False, got {done!r:.200}")
    return Step(messages_of(observation, what), float(reward), done)


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
