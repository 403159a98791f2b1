r"""An agent of OpenAI's Agents SDK: it answers by a tool that says how far off it is.

areal train examples/agents/arithmetic_grpo.yaml \
    workflow=examples.agents.with_openai_agents.Guesser workflow_kwargs={} \
    actor.path=Qwen/Qwen3-0.6B gconfig.max_new_tokens=512

Wants `pip install openai-agents`, and rows with `messages` and a number as `answer`.
"""

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from openai import AsyncOpenAI

disable_tracing(True)  # it would report to OpenAI


class Guesser:
    async def run(self, data: dict, *, base_url: str, api_key: str, **extra) -> float:
        answer, tried = int(data["answer"]), []

        @function_tool
        def guess(number: int) -> str:
            """Say whether a number is the answer, too low or too high."""
            tried.append(number)
            return "right" if number == answer else "too low" if number < answer else "too high"

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
            agent = Agent(name="guesser", model=model, tools=[guess])
            try:
                await Runner.run(agent, data["messages"], max_turns=8)
            except MaxTurnsExceeded:  # what the model does wrong is worth 0, not a failure
                return 0.0
        return 1.0 / len(tried) if answer in tried else 0.0
