"""An agent that looks: it shows the picture, and asks again after a wrong answer.

`shapes_agent_grpo.yaml` trains it. It talks to the model as to OpenAI; the picture goes as a data:
URL in its first message and stays in the chat.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from areal.workflow.image_chat import openai_chat
from examples.vlm.shapes import QUESTION


class LooksAgain:
    """Worth 1 for the right colour, less for each further look, 0 if it is never named."""

    def __init__(self, max_turns: int = 2, retry_worth: float = 0.5) -> None:
        self.max_turns, self.retry_worth = max_turns, retry_worth

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)
        messages: list[Any] = openai_chat(data)
        for turn in range(self.max_turns):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message.content or ""
            if said.strip() == data["answer"]:
                return self.retry_worth**turn
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": QUESTION},
            ]
        return 0.0
