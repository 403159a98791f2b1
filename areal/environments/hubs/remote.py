"""HubEnv: an environment whose code runs in a hub's own Python (bridge.py).

    hub = HubEnvs("reasoning-gym:chain_sum", {"max_terms": 2})
    environment = hub()            one episode, with the interface of every other environment
    hub.close()

One process per event loop serves all episodes. A call that is given up on (a time-out) may have
left the process stuck: it gets no new episode, is killed when its other episodes are over, and a
new one takes its place. An error of the hub, an answer of the wrong shape and the end of the
process are failures of the episode, never data.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from areal.api.redact import is_secret
from areal.environments.hubs.catalog import hub_interpreter, split_name
from areal.environments.interface import EnvError, Observation
from areal.environments.per_loop import PerLoop
from areal.environments.rpc import RpcError, RpcProcess
from areal.environments.tools import Tool

BRIDGE = Path(__file__).with_name("bridge.py")
_START_S = 600.0  # importing a hub's packages, on a busy machine


class HubEnvs:
    """Makes the environments of one name. ValueError if the hub is unknown or not installed."""

    def __init__(self, env: str, kwargs: Mapping[str, Any]) -> None:
        named = split_name(env)
        assert named is not None  # the caller has looked
        self.env = env
        self._hub, self._name = named
        self._kwargs = dict(kwargs)
        self._python = hub_interpreter(self._hub)
        self._current = PerLoop(self._start, _is_usable)
        self._started: list[Bridge] = []

    def __call__(self) -> HubEnv:
        return HubEnv(self)

    async def bridge(self) -> Bridge:
        """The process for a new episode."""
        return await self._current.get()

    def close(self) -> None:
        """Kill all processes."""
        for bridge in self._started:
            bridge.process.kill()

    async def _start(self) -> Bridge:
        argv = [self._python, "-P", str(BRIDGE), self._hub]  # -P: our folder has no modules for it
        process = await RpcProcess.start(argv, name=f"hub {self._hub}", env=_environment())
        bridge = Bridge(process, self.env)
        self._started = [one for one in self._started if not one.process.has_ended] + [bridge]
        try:
            async with asyncio.timeout(_START_S):
                await bridge.call("open", name=self._name, kwargs=self._kwargs)
        except BaseException:
            process.kill()
            raise
        return bridge


class Bridge:
    """One process and the number of its open episodes."""

    def __init__(self, process: RpcProcess, env: str) -> None:
        self.process = process
        self.is_retired = False
        self._env = env
        self._open: set[int] = set()
        self._ids = itertools.count()

    def enter(self) -> int:
        episode = next(self._ids)
        self._open.add(episode)
        return episode

    async def leave(self, episode: int) -> None:
        self._open.discard(episode)
        if self.is_retired and not self._open:
            self.process.kill()
        elif not self.is_retired and not self.process.has_ended:
            await self.call("close", episode=episode)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        try:
            result = await self.process.call(method, params)
        except RpcError as error:
            raise EnvError(f"environment {self._env}: {method} failed: {error}") from error
        except asyncio.CancelledError:
            self.is_retired = True  # nobody knows what it still does
            raise
        if not isinstance(result, dict):
            raise EnvError(f"environment {self._env}: {method} answered {result!r:.200}")
        return result


class HubEnv:
    """One episode."""

    def __init__(self, hub: HubEnvs) -> None:
        self._hub = hub
        self._bridge: Bridge | None = None
        self._episode = -1
        self.tools: list[Tool] = []

    async def reset(self, row: dict[str, Any]) -> Observation:
        self._bridge = await self._hub.bridge()
        self._episode = self._bridge.enter()
        answer = await self._call("reset", row=row)
        self.tools = [self._tool(given) for given in _field(answer, "tools", list)]
        return answer.get("observation", "")

    async def step(self, action: str) -> tuple[Observation | None, float, bool]:
        answer = await self._call("step", action=action)
        return answer.get("observation"), answer.get("reward"), answer.get("done")  # pyright: ignore[reportReturnType]  # see checked_step

    async def close(self) -> None:
        if self._bridge is not None:
            await self._bridge.leave(self._episode)

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        assert self._bridge is not None  # `reset` comes first
        return await self._bridge.call(method, episode=self._episode, **params)

    def _tool(self, given: Any) -> Tool:
        name, parameters = _field(given, "name", str), _field(given, "parameters", dict)
        function = partial(self._run_tool, name)
        return Tool(name, str(given.get("description") or ""), parameters, function)

    async def _run_tool(self, tool_name: str, /, **arguments: Any) -> str:
        return _field(await self._call("tool", name=tool_name, arguments=arguments), "text", str)


def _field(answer: Any, key: str, kind: type) -> Any:
    value = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise EnvError(f"the hub's answer needs a {kind.__name__} {key!r}, got {answer!r:.200}")
    return value


def _is_usable(bridge: Bridge) -> bool:
    return not bridge.is_retired and not bridge.process.has_ended


def _environment() -> dict[str, str]:
    """Ours, without areal's secrets and what would change the hub's Python."""
    dropped = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not (name.startswith("AREAL_") and is_secret(name, value))
    }
