"""Agents for tests, importable by name in other processes: good ones, and ways to go wrong."""

from __future__ import annotations

import asyncio
import os
import resource
from contextlib import suppress
from typing import Any

from openai import AsyncOpenAI

from areal.workflow.image_chat import openai_chat

QUESTION = [{"role": "user", "content": "2+2="}]


def client_of(extra: dict[str, Any]) -> AsyncOpenAI:
    """Works wherever the agent runs: only `inline` gives a client."""
    return AsyncOpenAI(
        base_url=extra["base_url"],
        api_key=extra["api_key"],
        http_client=extra.get("http_client"),
        max_retries=0,
    )


async def ask(client: AsyncOpenAI, messages: list[dict], **options: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **options)


class Turns:
    """Asks `num_turns` times, each time with all that was said before; the last is worth 1."""

    def __init__(self, num_turns: int = 2) -> None:
        self.num_turns = num_turns

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        client = client_of(extra)
        messages = list(data.get("messages", QUESTION))
        for turn in range(self.num_turns):
            reply = await ask(client, messages)
            messages.append(reply.choices[0].message.model_dump())
            messages.append({"role": "user", "content": f"again {turn}"})
        return 1.0


class DigitShare:
    """One self-correction: asks twice and is worth the share of digits in the last answer."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        client = client_of(extra)
        messages = list(data["messages"])
        for _ in range(2):
            reply = await ask(client, messages)
            answer = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "?"}]
        return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)


class ShowsItsRow:
    """Sends the chat of a row as it is, images included."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        await ask(client_of(extra), openai_chat(data))
        return 1.0


class FromEnvironment:
    """Knows nothing but the environment variables its SDK reads."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        await ask(AsyncOpenAI(), QUESTION)
        assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
        assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
        return float(os.getpid())


class Spy:
    """Works for its reward, and tells whether it saw a secret or could limit its parent."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        await ask(client_of(extra), QUESTION)
        with suppress(PermissionError):
            resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (3600, 3600))
            return 2.0
        return float("swordfish" in str(os.environ))


class ByCompletion:
    """Rewards by completion id: the first of two is worth 3."""

    async def run(self, data: dict[str, Any], **extra: Any) -> dict[str, float]:
        client = client_of(extra)
        replies = [await ask(client, QUESTION) for _ in range(2)]
        return {replies[0].id: 3}


class Broken:
    """Asks once, then does `how`."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        await ask(client_of(extra), QUESTION)
        if self.how == "raise":
            raise LookupError("the agent lost its way")
        if self.how == "hang":
            await asyncio.sleep(3600)
        if self.how == "exit":
            os._exit(3)
        return {"none": None, "nan": float("nan"), "text": "1.0", "unknown": {"x": 1.0}}[self.how]


class Silent:
    """Never asks the model."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        return 1.0


class ByRow:
    """The agent that the row names, so that one pool of processes serves many tests."""

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        return await globals()[data["agent"]](**data["kwargs"]).run({}, **extra)


turns = Turns(3)  # an agent that is built already


def never_continues(prefix: list[dict], messages: list[dict]) -> bool:
    return False
