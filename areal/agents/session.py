"""One agent episode: access key, recorded interactions, reward.

In: calls that carry the session's key. Out: the interactions, with rewards, as samples.

    open -> calls, each recorded when its reply is complete -> ended with a reward -> exported

An online session may end first and get its reward later (`awaits_reward`).

Invariant: a session contains only its own calls, and nothing is recorded after its end. A request
that failed with an internal error (status 500) fails the episode, even if the agent went on without
it, unless an equal request succeeded later (an SDK's retry): behaviour against a broken model is
not training data.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.agents.image_budget import ImageBudget
from areal.agents.retries import Attempts
from areal.api.interaction import InteractionCache, PrefixMatcher, checked_reward
from areal.api.workflow_context import workflow_context
from areal.openai.parsing.formats import format_of_template
from areal.utils.perf_tracer import episode_span

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from areal.agents.sight import Sight
    from areal.api.config.inference import AgentConfig, GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine
    from areal.api.interaction import InteractionWithTokenLogpReward


class AgentError(RuntimeError):
    """An agent's episode failed for a reason that is not the agent's own exception."""


class AgentTimeoutError(AgentError):
    """An episode took longer than `rollout.agent.session_timeout_seconds`."""


class SessionEndedError(Exception):
    """A call to a session that has ended."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options shared by all sessions of one workflow."""

    config: AgentConfig
    tokenizer: Any
    gconfig: GenerationHyperparameters  # for what a call leaves out
    matcher: PrefixMatcher | None = None
    sight: Sight | None = None  # None: the model reads text only

    @property
    def tool_format(self) -> str:
        name = self.config.tool_call_parser
        return format_of_template(self.tokenizer.chat_template) if name == "auto" else name


class Session:
    """Opened inside an episode, from whose seeds its calls draw. Used on one event loop."""

    def __init__(
        self, options: SessionOptions, engine: InferenceEngine, proxy_id: str = ""
    ) -> None:
        """`proxy_id`: its server's, by which a router finds that (registry.py)."""
        self.options = options
        self.engine = engine
        self.id = proxy_id + secrets.token_hex(6)
        self.key = f"sk-areal-{self.id}-{secrets.token_urlsafe(24)}"
        self.cache = InteractionCache(options.matcher)
        # Requests that failed with an internal error and have not succeeded since.
        self._failed: dict[str, Exception] = {}
        self.attempts = Attempts()  # of its answers
        self.image_budget = ImageBudget(options.config.max_image_mb)
        self.data: dict[str, Any] | None = None  # the row, for an external client to read
        self.started = asyncio.Event()  # set by such a client
        self.ended = asyncio.Event()
        self.rewarded = asyncio.Event()
        self.awaits_reward = False  # ended, and a reward may still come
        self._opened_at = self._asked_at = time.monotonic()
        # A call arrives on its own connection, outside the episode's context.
        self._context = contextvars.copy_context()
        self._calls: set[asyncio.Task] = set()
        self._answered_at: float | None = None  # the agent works from here to its next call

    def has_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self.key.encode())

    def touch(self) -> None:
        """A request came."""
        self._asked_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Since the newest request; 0 while a call runs."""
        return 0.0 if self._calls else time.monotonic() - self._asked_at

    def describe(self) -> dict[str, Any]:
        """For people who watch the run."""
        episode = self._context.run(workflow_context.get)
        if self.ended.is_set():
            state = "awaits reward" if self.awaits_reward else "ended"
        elif self.data is not None and not self.started.is_set():
            state = "offered"  # to the next client
        else:
            state = "generating" if self._calls else "open"
        return {
            "id": self.id,
            "task_id": None if episode is None else episode.task_id,
            "sample": None if episode is None else episode.sample,
            "state": state,
            "age_s": round(time.monotonic() - self._opened_at, 3),
            "completions": len(self.cache),
            "last_request_s": round(time.monotonic() - self._asked_at, 3),
        }

    def next_seed(self) -> int | None:
        return self._context.run(workflow_context.next_seed)

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work`, a model call; cancelled if the session ends first."""
        if self.ended.is_set():
            work.close()
            raise SessionEndedError
        if not self._calls and self._answered_at is not None:
            self._context.run(episode_span, "tool", self._answered_at, time.perf_counter())
        # In a copy of the episode's context, which is entered by one task at a time.
        context = self._context.copy()
        task = asyncio.create_task(work, name=f"session-{self.id}", context=context)
        self._calls.add(task)
        try:
            result = await task
            self._answered_at = time.perf_counter()
        except asyncio.CancelledError:
            if self.ended.is_set():
                raise SessionEndedError from None
            task.cancel()
            raise
        finally:
            self._calls.discard(task)
        return result

    def fail(self, request: str, error: Exception) -> None:
        """`request` got an internal error; equal requests have equal texts."""
        self._failed[request] = error

    def succeed(self, request: str) -> None:
        """Clear an earlier failure of the same request."""
        self._failed.pop(request, None)

    @property
    def has_failures(self) -> bool:
        return bool(self._failed)

    def end(self, reward: Any = None) -> None:
        """Cancels running calls. `reward`: a number, or numbers by completion id."""
        if self.ended.is_set():
            raise SessionEndedError
        if reward is not None:
            self.set_reward(reward)
        may_be_late = self.options.config.set_reward_finish_timeout > 0
        self.awaits_reward = may_be_late and bool(self.cache) and not self.rewarded.is_set()
        self.close()

    def close(self) -> None:
        """End without an outcome. Idempotent."""
        self.ended.set()
        for task in self._calls:
            task.cancel()

    def set_reward(self, reward: Any) -> None:
        """A number for the newest completion, or a dict of numbers by completion id or turn."""
        if not isinstance(reward, dict):
            self.cache.set_last_reward(checked_reward(reward))
        elif not reward:
            raise ValueError("an empty dict of rewards: give one completion its reward")
        else:
            for interaction_id, value in reward.items():
                self.cache.set_reward(interaction_id, value)
        self.rewarded.set()
        self.awaits_reward = False

    def export(self) -> dict[str, InteractionWithTokenLogpReward]:
        """The samples of a finished episode, with discounted rewards."""
        self.raise_if_failed()
        config = self.options.config
        if config.drop_retry_orphans:
            self.cache.drop_retry_orphans()
        self.cache.apply_reward_discount(config.turn_discount)
        return self.cache.export_interactions(config.export_style)

    def raise_if_failed(self) -> None:
        if self._failed:
            error = next(iter(self._failed.values()))
            raise AgentError(
                f"a call to the model failed on the server's side: {type(error).__name__}: {error}"
            ) from error
