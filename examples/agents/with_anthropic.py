r"""An agent on Anthropic's SDK: it answers by a tool that says how far off it is.

areal train examples/agents/arithmetic_grpo.yaml workflow=examples.agents.with_anthropic.Guesser \
    workflow_kwargs={} actor.path=Qwen/Qwen3-0.6B gconfig.max_new_tokens=512

Wants `pip install anthropic`, and rows with `messages` and a number as `answer`.
"""

from anthropic import AsyncAnthropic

TOOL = {
    "name": "guess",
    "description": "Say whether a number is the answer, too low or too high.",
    "input_schema": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
    },
}


class Guesser:
    async def run(self, data: dict, *, base_url: str, api_key: str, **extra) -> float:
        answer, tried = int(data["answer"]), []
        messages = list(data["messages"])
        # This SDK adds the /v1 itself.
        async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
            for _ in range(8):
                reply = await client.messages.create(
                    model="policy", max_tokens=256, messages=messages, tools=[TOOL]
                )
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    break
                results = []
                for call in calls:
                    tried.append(call.input.get("number"))
                    results.append(
                        {
                            "type": "tool_result",
                            "tool_use_id": call.id,
                            "content": verdict(tried[-1], answer),
                        }
                    )
                messages += [
                    {"role": "assistant", "content": reply.content},
                    {"role": "user", "content": results},
                ]
        return 1.0 / len(tried) if answer in tried else 0.0


def verdict(number: object, answer: int) -> str:
    if not isinstance(number, int):
        return "not a number"
    return "right" if number == answer else "too low" if number < answer else "too high"
