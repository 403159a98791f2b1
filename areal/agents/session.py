"""One episode's conversation with the model: who may speak, what was said, what it was worth.

In: calls that carry the session's key. Out: the interactions, with rewards, as samples.

    open -> calls, each recorded when its reply is complete -> ended with a reward -> exported

Invariant: a session sees its own calls only, and nothing is recorded after its end. A request that
failed on our side (status 500) makes the episode fail, unless the same request succeeded later: an
SDK's retry. Also if the agent went on without it: what an agent does with a broken model is not
data.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.interaction import InteractionCache, PrefixMatcher, checked_reward
from areal.api.workflow_context import workflow_context

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from areal.api.config.inference import AgentConfig, GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine
    from areal.api.interaction import InteractionWithTokenLogpReward


class AgentError(RuntimeError):
    """An episode of an agent failed in a way that its own exception does not tell."""


class AgentTimeoutError(AgentError):
    """An episode took longer than `rollout.agent.session_timeout_seconds`."""


class SessionEndedError(Exception):
    """A call to a session that is over."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What the sessions of one workflow have in common."""

    config: AgentConfig
    tokenizer: Any
    gconfig: GenerationHyperparameters  # what a call leaves open
    matcher: PrefixMatcher | None = None


class Session:
    """Opened inside an episode, whose seeds its calls draw. Used on one event loop."""

    def __init__(self, options: SessionOptions, engine: InferenceEngine) -> None:
        self.options = options
        self.engine = engine
        self.id = secrets.token_hex(8)
        self.key = f"sk-areal-{self.id}-{secrets.token_urlsafe(24)}"
        self.cache = InteractionCache(options.matcher)
        # Requests that failed on our side and have not succeeded since.
        self._failed: dict[str, Exception] = {}
        self.data: dict[str, Any] | None = None  # the row, for a client outside to read
        self.started = asyncio.Event()  # by such a client
        self.ended = asyncio.Event()
        # A call comes in on a connection of its own, outside the episode's context.
        self._context = contextvars.copy_context()
        self._calls: set[asyncio.Task] = set()

    def has_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self.key.encode())

    def next_seed(self) -> int | None:
        return self._context.run(workflow_context.next_seed)

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work`, a call to the model, unless the session ends before it does."""
        if self.ended.is_set():
            work.close()
            raise SessionEndedError
        task = asyncio.create_task(work, name=f"session-{self.id}")
        self._calls.add(task)
        try:
            result = await task
        except asyncio.CancelledError:
            if self.ended.is_set():
                raise SessionEndedError from None
            task.cancel()
            raise
        finally:
            self._calls.discard(task)
        return result

    def fail(self, request: str, error: Exception) -> None:
        """`request` was answered with a fault of ours; equal requests have equal texts."""
        self._failed[request] = error

    def succeed(self, request: str) -> None:
        """Heals what failed before."""
        self._failed.pop(request, None)

    @property
    def has_failures(self) -> bool:
        return bool(self._failed)

    def end(self, reward: Any = None) -> None:
        """Calls that still run are cancelled. `reward`: a number, numbers by completion id."""
        if self.ended.is_set():
            raise SessionEndedError
        if reward is not None:
            self.set_reward(reward)
        self.close()

    def close(self) -> None:
        """The end without an outcome. Twice is fine."""
        self.ended.set()
        for task in self._calls:
            task.cancel()

    def set_reward(self, reward: Any) -> None:
        """A number for the newest completion, or a dict of numbers by completion id."""
        if not isinstance(reward, dict):
            self.cache.set_last_reward(checked_reward(reward))
            return
        if not reward:
            raise ValueError("an empty dict of rewards: give one completion its reward")
        for interaction_id, value in reward.items():
            self.cache.set_reward(interaction_id, value)

    def export(self) -> dict[str, InteractionWithTokenLogpReward]:
        """The samples of an episode that is over, discounted."""
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
