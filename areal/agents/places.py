"""Where an agent's code runs: in the controller's event loop, or in processes of its own.

In: a data row and an open session. Out: the session, told its outcome; or the exception that the
episode failed with. Both give `run` the session's `base_url` and `api_key`; `inline` adds an
`http_client`, `subproc` sets the environment variables that OpenAI's and Anthropic's SDKs read.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from typing import Any

from areal.agents.agent_call import AgentCall, checked_outcome
from areal.agents.session import AgentError, AgentTimeoutError, Session
from areal.api.config.limits import ProcessLimits
from areal.sandbox.pool import AsyncRewardWrapper, RewardError, RewardTimeoutError


class InlineAgent:
    """Awaits the agent here. It must not block: what waits without `await` stops all episodes."""

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
                if not deadline.expired():  # the agent's own
                    raise
                raise AgentTimeoutError(_too_long(self._name, self._timeout_s)) from None
        session.end(checked_outcome(reward, self._name))

    def close(self) -> None:
        """Nothing was started."""

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
    """A pool of processes, each with one episode at a time. A crash or hang ends that one."""

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
        except RewardError as error:  # it raised, or its process died
            raise AgentError(str(error)) from None

    def close(self) -> None:
        self._pool.close()


def _too_long(name: str, timeout_s: float) -> str:
    return (
        f"{name} did not finish within {timeout_s:g} s "
        "(rollout.agent.session_timeout_seconds); the episode was ended"
    )
