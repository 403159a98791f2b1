"""Agents as workflows: one session per episode, and its interactions as the result.

    arun_episode -> session opened -> agent.run(data, base_url, api_key) -> reward
                          |                       |  over HTTP
                          v                       v
                       interactions  <-------  proxy -> engine.agenerate

`inline` and `subproc` run the user's agent; `online` hands sessions to external clients. Each
workflow has its own proxy, on the loop of its episodes, until `close`; `folder` is where proxies
register (registry.py). `check_agent_options` is also used by `areal check`, so this file must not
import torch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.agents.episode_log import EpisodeLog
from areal.agents.preconditions import admin_key, check_agent_options
from areal.agents.proxy import AgentProxy
from areal.agents.runners import InlineAgent, SubprocAgent
from areal.agents.session import AgentTimeoutError, Session, SessionOptions
from areal.agents.silent_tools import SilentTools
from areal.api.interaction import InteractionWithTokenLogpReward
from areal.api.workflow_api import RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.utils import stats_tracker
from areal.utils.chat_template import warm_up
from areal.utils.import_path import load

if TYPE_CHECKING:
    from pathlib import Path

    from areal.agents.sight import Sight
    from areal.api.config.inference import AgentConfig, GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


_CLOSE_S = 10.0

Interactions = dict[str, InteractionWithTokenLogpReward]


def agent_workflow(
    agent: Any,
    kwargs: dict[str, Any],
    *,
    config: AgentConfig,
    tokenizer: Any,
    gconfig: GenerationHyperparameters,
    sight: Sight | None = None,
    folder: Path | None = None,
    logs: Path | None = None,
) -> RolloutWorkflow:
    """`agent` is an object with an async `run`, or a class to build with `kwargs`.

    `folder` is where the server for agents has its entry (registry.py). With `logs` the training
    episodes are kept there (episode_log.py). Without `sight` images are refused.
    """
    check_agent_options(config)
    options = _session_options(config, tokenizer, gconfig, sight)
    timeout_s = config.session_timeout_seconds
    if config.mode == "subproc":
        workers = config.subproc_max_workers
        place = SubprocAgent(
            agent, kwargs, timeout_s=timeout_s, max_workers=workers, limits=config.limits
        )
    else:
        place = InlineAgent(agent, kwargs, timeout_s=timeout_s)
    return AgentEpisodes(place, options, folder=folder, logs=logs)


def online_workflow(
    *,
    config: AgentConfig,
    tokenizer: Any,
    gconfig: GenerationHyperparameters,
    sight: Sight | None = None,
    folder: Path | None = None,
    logs: Path | None = None,
    is_routed: bool = False,
) -> RolloutWorkflow:
    """Sessions for clients that hold the admin key, which comes from the environment.

    With `is_routed` clients come through a router (router.py), which has the admin key and the
    address of the config; this process has a port of its own. The rest is as in `agent_workflow`.
    """
    if is_routed:
        config, key = dataclasses.replace(config, port=0, advertise_url=None), None
    else:
        check_agent_options(config)
        key = admin_key()
    options = _session_options(config, tokenizer, gconfig, sight)
    return OnlineEpisodes(options, admin_key=key, folder=folder, logs=logs)


class AgentEpisodes(RolloutWorkflow):
    """The user's agent: any object with `async run(data, **kwargs) -> reward`."""

    def __init__(
        self,
        place: InlineAgent | SubprocAgent,
        options: SessionOptions,
        *,
        folder: Path | None,
        logs: Path | None,
    ) -> None:
        self._place = place
        self._options = options
        self._outcomes = _Outcomes(options, logs)
        self._proxy = _ProxyOfLoop(options.config, folder=folder)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Interactions:
        proxy = await self._proxy.get()
        session = Session(self._options, engine, proxy.id)
        async with proxy.admitted(session):
            await self._place.run(data, session, proxy.base_url)
        return await self._outcomes.take(session)

    def close(self) -> None:
        self._proxy.close()
        self._place.close()


class OnlineEpisodes(RolloutWorkflow):
    """Episodes driven by external clients: start a session, call the model, set a reward, end it.

    A session that ends and gets no reward, or not in time, is a rejected episode.
    """

    def __init__(
        self,
        options: SessionOptions,
        *,
        admin_key: str | None,
        folder: Path | None,
        logs: Path | None,
    ) -> None:
        self._options = options
        self._outcomes = _Outcomes(options, logs)
        self._proxy = _ProxyOfLoop(options.config, admin_key=admin_key, folder=folder)

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> Interactions | None:
        proxy = await self._proxy.get()
        session = Session(self._options, engine, proxy.id)
        session.data = data
        proxy.offer(session)
        try:
            await session.started.wait()
            await self._until_ended(session)
            await self._until_rewarded(session)
        finally:
            proxy.release(session)
        session.raise_if_failed()
        return await self._outcomes.take(session) if session.rewarded.is_set() else None

    def close(self) -> None:
        self._proxy.close()

    async def _until_ended(self, session: Session) -> None:
        timeout_s = self._options.config.session_timeout_seconds
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_over(session)
        except TimeoutError:
            raise AgentTimeoutError(
                f"a client did not end session {session.id} within {timeout_s:g} s "
                "(rollout.agent.session_timeout_seconds)"
            ) from None

    async def _until_over(self, session: Session) -> None:
        """Ended, or rewarded and without a request for `set_reward_finish_timeout`."""
        late_s = self._options.config.set_reward_finish_timeout
        if late_s == 0:
            await session.ended.wait()
        while not session.ended.is_set():
            left_s = late_s - session.idle_s if session.rewarded.is_set() else late_s
            if left_s <= 0:
                session.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(session.ended.wait(), left_s)

    async def _until_rewarded(self, session: Session) -> None:
        if session.awaits_reward:
            late_s = self._options.config.set_reward_finish_timeout
            with suppress(TimeoutError):
                await asyncio.wait_for(session.rewarded.wait(), late_s)


class _ProxyOfLoop:
    """One proxy per event loop that runs episodes: a training run has one, a notebook several."""

    def __init__(self, config: AgentConfig, **options: Any) -> None:
        self._config = config
        self._options = options
        self._proxy: AgentProxy | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def get(self) -> AgentProxy:
        if self._closed:
            raise RuntimeError("the workflow of this agent is closed")
        loop = asyncio.get_running_loop()
        if self._proxy is None or self._loop is not loop:
            self._proxy, self._loop = AgentProxy(self._config, **self._options), loop
        await self._proxy.start()
        return self._proxy

    def close(self) -> None:
        """Thread-safe and idempotent, also when the loop is closed."""
        self._closed = True
        loop, proxy, self._loop = self._loop, self._proxy, None
        if loop is None or proxy is None or not loop.is_running():
            return
        if _is_current(loop):
            loop.create_task(proxy.stop(), name="agent-proxy-stop")
            return
        stopped = asyncio.run_coroutine_threadsafe(proxy.stop(), loop)
        try:
            stopped.result(_CLOSE_S)
        except concurrent.futures.TimeoutError:
            stopped.cancel()


class _Outcomes:
    """What finished sessions leave: samples, statistics, and lines in the run's logs."""

    def __init__(self, options: SessionOptions, logs: Path | None) -> None:
        self._silent_tools = SilentTools(options.tool_format)
        self._log = None if logs is None else EpisodeLog(logs)

    async def take(self, session: Session) -> Interactions:
        exported, cache = session.export(), session.cache
        outcome_id = list(cache)[-1]
        reward = cache[outcome_id].reward
        assert reward is not None  # discounting assigned one to every completion
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            reward=reward,
            num_turns=len(cache),
            num_branches=len(cache.leaves()) - 1,
        )
        if workflow_context.is_eval:
            # Not trained on; as one sample, a long episode counts once in the mean over episodes.
            return {outcome_id: cache[outcome_id]}
        self._silent_tools.note(cache.values())
        current = workflow_context.get()
        if self._log is not None and current is not None:
            place = {"task_id": current.task_id, "sample": current.sample}
            # In a thread: a long episode takes milliseconds.
            await asyncio.to_thread(self._log.write, cache, reward=reward, **place)
        return exported


def _session_options(
    config: AgentConfig, tokenizer: Any, gconfig: GenerationHyperparameters, sight: Sight | None
) -> SessionOptions:
    tokenizer("")  # initialises its internal state: only then may threads share it
    warm_up()
    matcher = None
    if config.prefix_matcher is not None:
        matcher = load(config.prefix_matcher, key="rollout.agent.prefix_matcher")
    return SessionOptions(config, tokenizer, gconfig, matcher, sight)


def _is_current(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
