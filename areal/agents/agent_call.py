"""One episode of an agent in a process of its own: what is sent there, and what runs there.

In: a data row and the address and key of a session. Out: nothing but the session's end, told over
HTTP through the same door as everybody's; an exception is raised by whoever called.

The process belongs to a pool that `AsyncRewardWrapper` keeps: it dies with the controller, a call
that hangs is killed with it, and one that crashes takes no other along.
"""

from __future__ import annotations

import asyncio
import json
import numbers
import os
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from areal.api.interaction import checked_reward

END_TIMEOUT_S = 60.0


@dataclass(slots=True)
class AgentCall:
    """Runs in the child. `agent` is an object with `run`, or a class that `kwargs` build there."""

    agent: Any
    kwargs: dict[str, Any]
    _built: Any = field(default=None, init=False)
    _loop: asyncio.Runner | None = field(default=None, init=False)

    def __repr__(self) -> str:
        kind = self.agent if isinstance(self.agent, type) else type(self.agent)
        return f"agent {kind.__module__}.{kind.__qualname__}"

    def __call__(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        os.environ.update(environment(base_url, api_key))
        if self._loop is None:
            # One loop for all episodes: clients that an agent keeps belong to their first loop.
            self._loop = asyncio.Runner()
            self._built = self.agent(**self.kwargs) if isinstance(self.agent, type) else self.agent
        reward = self._loop.run(self._built.run(data, base_url=base_url, api_key=api_key))
        end_session(base_url, api_key, checked_outcome(reward, self))
        return 0.0


def environment(base_url: str, api_key: str) -> dict[str, str]:
    """What the SDKs read when they are given nothing."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its SDK adds the /v1
        "ANTHROPIC_API_KEY": api_key,
    }


def end_session(base_url: str, api_key: str, reward: float | dict[str, float]) -> None:
    """Tell the session what the episode was worth."""
    request = urllib.request.Request(
        f"{base_url.removesuffix('/v1')}/rl/end_session",
        data=json.dumps({"reward": reward}).encode(),
        headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    # Without proxies of the environment: the session is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=END_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
    raise ValueError(message)


def checked_outcome(reward: Any, name: object) -> float | dict[str, float]:
    """What `run` of the agent `name` returned, as plain numbers; a failure is never a number."""
    if isinstance(reward, dict) and reward:
        return {str(key): checked_reward(value) for key, value in reward.items()}
    if not isinstance(reward, numbers.Real):
        raise TypeError(
            f"{name}: run() must return a reward (a float, or a dict of floats by completion id), "
            f"got {reward!r:.200}"
        )
    return checked_reward(reward)
