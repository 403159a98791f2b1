"""The game of examples/agents through the other SDKs, each as its documentation has it.

Runs in .venv-agents, without areal: `python players.py MODULE.CLASS` plays one episode. The row
comes as JSON on stdin, the address and key of the session in the variables that SDKs read, and the
last line of the output is the reward. One SDK per process, so each is imported where it is used.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import Any

GUESS = {
    "name": "guess",
    "description": "Say whether a number is the answer, too low or too high.",
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
    },
}


class Game:
    def __init__(self, data: dict[str, Any]) -> None:
        self.answer = int(data["answer"])
        self.tried: list[int] = []

    def guess(self, number: int) -> str:
        self.tried.append(number)
        if number == self.answer:
            return "right"
        return "too low" if number < self.answer else "too high"

    def reward(self) -> float:
        return 1.0 / len(self.tried) if self.answer in self.tried else 0.0


class OpenAIChat:
    """Chat completions, streamed, as its helper of streams does it."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        from openai import AsyncOpenAI

        game, messages = Game(data), list(data["messages"])
        client = AsyncOpenAI(**extra)
        tools = [{"type": "function", "function": GUESS}]
        for _ in range(8):
            async with client.chat.completions.stream(
                model="policy", messages=messages, tools=tools
            ) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                told = game.guess(json.loads(call.function.arguments)["number"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
            if not message.tool_calls:
                break
        return game.reward()


class OpenAIResponses:
    """Responses, each of which names the one before it."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        from openai import AsyncOpenAI

        game, items, previous = Game(data), list(data["messages"]), None
        client = AsyncOpenAI(**extra)
        for _ in range(8):
            response = await client.responses.create(
                model="policy",
                input=items,
                previous_response_id=previous,
                tools=[{"type": "function", **GUESS}],
            )
            calls = [item for item in response.output if item.type == "function_call"]
            items, previous = [], response.id
            for call in calls:
                told = game.guess(json.loads(call.arguments)["number"])
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": told}
                )
            if not calls:
                break
        return game.reward()


class PydanticAI:
    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        game = Game(data)
        agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(**extra)))
        agent.tool_plain(game.guess)
        await agent.run(data["messages"][-1]["content"])
        return game.reward()


class Smolagents:
    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        from smolagents import OpenAIModel, Tool, ToolCallingAgent

        game = Game(data)

        class Guess(Tool):
            name = "guess"
            description = GUESS["description"]
            inputs = {"number": {"type": "integer", "description": "a number"}}
            output_type = "string"

            def forward(self, number: int) -> str:
                return game.guess(number)

        model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
        ToolCallingAgent([Guess()], model, max_steps=8).run(data["messages"][-1]["content"])
        return game.reward()


def main(name: str) -> None:
    module, _, cls = name.rpartition(".")
    player = getattr(importlib.import_module(module), cls)()
    address = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    print(asyncio.run(player.run(json.load(sys.stdin), **address)))


if __name__ == "__main__":
    main(sys.argv[1])
