"""Simulated users: what a customer says to the agent, and when he leaves.

    user = ScriptedUser(scenario)            # by rules: for CPUs and tests
    user = ModelUser(scenario, url, model)   # another model, by OpenAI's API
    await user.opening()                     # his first message
    await user.reply("Which number?")        # the next one; None: he leaves

A user whose server fails or returns nonsense raises, so that the episode fails and is run again.
"""

from __future__ import annotations

import os

import httpx

from areal.environments.interface import EnvError
from examples.customer_service.shop import OUTCOMES, Scenario

API_KEY = "USER_MODEL_API_KEY"  # variable with the key of the user's model, if it wants one
MAX_QUESTIONS = 2
LEAVES = "LEAVE"
SCENE = (
    "You play a customer of a shop in a chat with its service. You want to {wish} your order "
    "number {order}. Begin without the number, and say it only when you are asked. Write one short "
    "message at a time. When you were told that it is done or that it cannot be done, answer with "
    "the one word {leaves}."
)


class ScriptedUser:
    """Says his number when asked, and leaves once he was told an outcome."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.questions_left = MAX_QUESTIONS

    async def opening(self) -> str:
        return f"please {self.scenario.wish} my order."

    async def reply(self, message: str) -> str | None:
        is_outcome = any(word in message.casefold() for word in OUTCOMES)
        if is_outcome or self.questions_left == 0:
            return None
        self.questions_left -= 1
        return f"{self.scenario.order}."


class ModelUser:
    """`url` is that of an OpenAI-compatible server, with its /v1."""

    def __init__(self, scenario: Scenario, url: str, model: str, timeout_s: float = 60) -> None:
        scene = SCENE.format(wish=scenario.wish, order=scenario.order, leaves=LEAVES)
        self.messages = [
            {"role": "system", "content": scene},
            {"role": "user", "content": "Hello, how can I help you?"},
        ]
        self.url, self.model, self.timeout_s = url.rstrip("/"), model, timeout_s

    async def opening(self) -> str:
        return await self._say()

    async def reply(self, message: str) -> str | None:
        # To the user's model the agent is its user.
        self.messages.append({"role": "user", "content": message})
        said = await self._say()
        return None if LEAVES in said else said

    async def _say(self) -> str:
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self.model, "messages": self.messages, "max_tokens": 200}
        try:
            async with httpx.AsyncClient(timeout=self.timeout_s, trust_env=False) as http:
                answer = await http.post(f"{self.url}/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise EnvError(f"user_url: {self.url}: {type(error).__name__}: {error}") from error
        try:
            said = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EnvError(
                f"user_url: {self.url} answered with status {answer.status_code} and "
                f"{answer.text!r:.300}; expected a chat completion of the model {self.model!r}"
            ) from error
        if not isinstance(said, str) or not said.strip():
            raise EnvError(f"user_url: {self.url} replied {said!r:.80}, expected a text")
        self.messages.append({"role": "assistant", "content": said})
        return said
