"""Episodes without an engine of areal: the oracle, and servers that speak only OpenAI's API.

They return {"text": TextSample} instead of a trajectory, since nobody knows the tokens.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from areal.api.config.inference import GenerationHyperparameters
from areal.api.json_text import loads_object
from areal.api.workflow_api import RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.sandbox.pool import AsyncRewardWrapper
from areal.workflow.chat import REWARD_ARGUMENTS, messages_of

TEXT_KEY = "text"
REFERENCES = ("solution", "answer")  # columns that hold a right answer, the better one first


@dataclass(frozen=True, slots=True)
class TextSample:
    completion: str
    reward: float
    is_truncated: bool = False
    num_tokens: int = 0


class _ScoredText(RolloutWorkflow):
    """Asks for a text, and scores it as `rlvr` does."""

    def __init__(self, reward_fn: Callable[..., float], reward_kwargs: dict[str, Any]) -> None:
        self._reward = AsyncRewardWrapper(reward_fn, **reward_kwargs)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        completion, is_truncated, num_tokens = await self._answer(data)
        columns = {key: value for key, value in data.items() if key not in REWARD_ARGUMENTS}
        prompt = "\n".join(str(turn.get("content")) for turn in data.get("messages", ()))
        reward = await self._reward(prompt, completion, [], [], **columns)
        return {TEXT_KEY: TextSample(completion, reward, is_truncated, num_tokens)}

    @abstractmethod
    async def _answer(self, data: dict[str, Any]) -> tuple[str, bool, int]:
        """Text, whether it was cut off, number of tokens."""

    def close(self) -> None:
        self._reward.close()


class Oracle(_ScoredText):
    """Answers with the row's own reference: anything but a full score is a fault of the reward or
    of the rows."""

    async def _answer(self, data: dict[str, Any]) -> tuple[str, bool, int]:
        for column in REFERENCES:
            if data.get(column):
                return str(data[column]), False, 0
        raise ValueError(
            f"the oracle needs a reference answer in column {' or '.join(REFERENCES)}, found "
            f"{', '.join(data)}"
        )


class ServedChat(_ScoredText):
    """POST {base}/chat/completions."""

    def __init__(
        self,
        reward_fn: Callable[..., float],
        reward_kwargs: dict[str, Any],
        *,
        base: str,
        model: str,
        token: str,
        gconfig: GenerationHyperparameters,
        timeout_s: float,
    ) -> None:
        super().__init__(reward_fn, reward_kwargs)
        options = gconfig.new(n_samples=1).to_openai_completions_args_dict()
        options |= options.pop("extra_body", {})
        # The older name is the one that every server knows.
        options["max_tokens"] = options.pop("max_completion_tokens")
        self._url, self._headers = f"{base}/chat/completions", bearer(token)
        self._body, self._fixed_seed = {**options, "model": model}, gconfig.seed
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def _answer(self, data: dict[str, Any]) -> tuple[str, bool, int]:
        seed = self._fixed_seed if self._fixed_seed is not None else workflow_context.next_seed()
        body = {**self._body, "messages": messages_of(data), "seed": seed}
        async with (
            aiohttp.ClientSession(timeout=self._timeout, headers=self._headers) as session,
            session.post(self._url, json=body) as response,
        ):
            return _chat_reply(self._url, response.status, await response.read())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _chat_reply(url: str, status: int, body: bytes) -> tuple[str, bool, int]:
    if status != 200:
        raise RuntimeError(f"{url} answered {status}: {body[:200].decode('utf-8', 'replace')}")
    try:
        reply = loads_object(body)
        choice = reply["choices"][0]
        text = choice["message"].get("content") or ""
        tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
        if not isinstance(text, str) or type(tokens) is not int:
            raise TypeError("content must be a text, usage.completion_tokens a number")
        return text, choice.get("finish_reason") == "length", tokens
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RuntimeError(f"{url}: malformed reply ({error!r}): {body[:200]!r}") from error


class ServedAgent(RolloutWorkflow):
    """A user's agent that talks to the served model itself; its reward is the result."""

    def __init__(self, agent: Any, kwargs: dict[str, Any], *, base: str, token: str) -> None:
        self._agent: Any = agent(**kwargs) if inspect.isclass(agent) else agent
        self._where = {"base_url": base, "api_key": token or "none"}

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        reward = await self._agent.run(data, **self._where)
        if isinstance(reward, dict):  # by completion: the last one's is the episode's
            reward = list(reward.values())[-1]
        return {TEXT_KEY: TextSample("", float(reward))}


async def first_model(base: str, token: str) -> str:
    """The name of the server's first model."""
    async with (
        aiohttp.ClientSession(headers=bearer(token)) as session,
        session.get(f"{base}/models") as response,
    ):
        body = await response.read()
        if response.status != 200:
            raise ValueError(
                f"{base}/models answered {response.status}: {body[:200].decode('utf-8', 'replace')}"
                "; name the model in the address (#name)"
            )
    try:
        return str(loads_object(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{base}/models: malformed reply ({error!r}); name the model in the address (#name)"
        ) from error
