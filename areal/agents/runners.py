"""Where an agent's code runs: inline on the controller's event loop, or in a worker process.

In: a data row and an open session. Out: the session, ended with its reward, or the exception that
the episode failed with. Both runners pass `run` the session's `base_url` and `api_key`; `inline`
adds an `http_client`, `subproc` sets the environment variables that OpenAI's and Anthropic's SDKs
read.

`AgentCall` is what `subproc` sends to a process of `AsyncRewardWrapper`'s pool: it ends its session
over HTTP, and an exception is raised in the caller. The process dies with the controller; a hang or
crash costs only its own episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import numbers
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from areal.agents.session import AgentError, AgentTimeoutError, Session
from areal.api.config.inference import ProcessLimits
from areal.api.interaction import checked_reward
from areal.sandbox.pool import AsyncRewardWrapper, RewardError, RewardTimeoutError


class InlineAgent:
    """Awaits the agent here. It must not block: a blocking call stops all episodes."""

    def __init__(self, agent: Any, kwargs: dict[str, Any], *, timeout_s: float) -> None:
        self._agent = agent(**kwargs) if isinstance(agent, type) else agent
        self._name = repr(AgentCall(agent, {}))
        self._timeout_s = timeout_s
        self._tls: ssl.SSLContext | None = None

    async def run(self, data: dict[str, Any], session: Session, base_url: str) -> None:
        async with self._client() as client:
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    running = self._agent.run(
                        data, base_url=base_url, api_key=session.key, http_client=client
                    )
                    if not inspect.isawaitable(running):
                        raise TypeError(
                            f"{self._name}: run must be `async def`, got {running!r:.60}"
                        )
                    reward = await running
            except TimeoutError:
                if not deadline.expired():  # raised by the agent itself
                    raise
                raise AgentTimeoutError(_too_long(self._name, self._timeout_s)) from None
        session.end(checked_outcome(reward, self._name))

    def close(self) -> None:
        """No-op: nothing was started."""

    def _client(self) -> Any:
        """One per episode: SDKs close the client they were given. Certificates are read once."""
        try:
            import httpx
        except ImportError:
            raise ValueError(
                "rollout.agent.mode=inline gives agents an httpx client and httpx is missing: "
                "pip install 'areal[agents]'"
            ) from None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return httpx.AsyncClient(verify=self._tls, timeout=self._timeout_s)


class SubprocAgent:
    """A pool of processes, one episode at a time each. A crash or hang ends only that episode."""

    def __init__(
        self,
        agent: Any,
        kwargs: dict[str, Any],
        *,
        timeout_s: float,
        max_workers: int,
        limits: ProcessLimits | None = None,
    ) -> None:
        call = AgentCall(agent, kwargs)
        self._name = repr(call)
        self._timeout_s = timeout_s
        try:
            self._pool = AsyncRewardWrapper(
                call,
                timeout_seconds=timeout_s,
                max_workers=max_workers,
                max_retries=0,
                limits=limits,
            )
        except ValueError as error:
            raise ValueError(
                f"workflow: {self._name} cannot be sent to another process (rollout.agent.mode="
                f"subproc): {error.__cause__ or error}; define its class at the top level of a "
                "module, and give it arguments that pickle"
            ) from error

    async def run(self, data: dict[str, Any], session: Session, base_url: str) -> None:
        try:
            await self._pool(data, base_url, session.key)
        except RewardTimeoutError:
            raise AgentTimeoutError(_too_long(self._name, self._timeout_s)) from None
        except RewardError as error:  # the agent raised, or its process died
            raise AgentError(str(error)) from None

    def close(self) -> None:
        self._pool.close()


def _too_long(name: str, timeout_s: float) -> str:
    return (
        f"{name} did not finish within {timeout_s:g} s "
        "(rollout.agent.session_timeout_seconds); the episode was ended"
    )


END_TIMEOUT_S = 60.0


@dataclass(slots=True)
class AgentCall:
    """Runs in the child. `agent`: an object with `run`, or a class to build there with `kwargs`."""

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
            # One loop for all episodes: clients an agent keeps are bound to their first loop.
            self._loop = asyncio.Runner()
            self._built = self.agent(**self.kwargs) if isinstance(self.agent, type) else self.agent
        reward = self._loop.run(self._built.run(data, base_url=base_url, api_key=api_key))
        end_session(base_url, api_key, checked_outcome(reward, self))
        return 0.0


def environment(base_url: str, api_key: str) -> dict[str, str]:
    """Variables that the SDKs read by default."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its SDK adds the /v1
        "ANTHROPIC_API_KEY": api_key,
    }


def end_session(base_url: str, api_key: str, reward: float | dict[str, float]) -> None:
    """Report the episode's reward to its session."""
    request = urllib.request.Request(
        f"{base_url.removesuffix('/v1')}/rl/end_session",
        data=json.dumps({"reward": reward}).encode(),
        headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    # Ignore proxies of the environment: the session is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=END_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
    raise ValueError(message)


def checked_outcome(reward: Any, name: object) -> float | dict[str, float]:
    """The reward returned by `run` of the agent `name`, as plain numbers; raises if it is none."""
    if isinstance(reward, dict) and reward:
        return {str(key): checked_reward(value) for key, value in reward.items()}
    if not isinstance(reward, numbers.Real):
        raise TypeError(
            f"{name}: run() must return a reward (a float, or a dict of floats by completion id), "
            f"got {reward!r:.200}"
        )
    return checked_reward(reward)
