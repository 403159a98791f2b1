r"""An agent of LangGraph: it answers by a tool that says how far off it is.

areal train examples/agents/arithmetic_grpo.yaml workflow=examples.agents.with_langgraph.Guesser \
    workflow_kwargs={} actor.path=Qwen/Qwen3-0.6B gconfig.max_new_tokens=512

Wants `pip install langgraph langchain-openai`, and rows with `messages` and a number as `answer`.
"""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


class Guesser:
    async def run(self, data: dict, *, base_url: str, api_key: str, **extra) -> float:
        answer, tried = int(data["answer"]), []

        @tool
        def guess(number: int) -> str:
            """Say whether a number is the answer, too low or too high."""
            tried.append(number)
            return "right" if number == answer else "too low" if number < answer else "too high"

        model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([guess])

        async def think(state: MessagesState) -> dict:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("think", think)
        graph.add_node("tools", ToolNode([guess]))
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", tools_condition)
        graph.add_edge("tools", "think")
        try:
            await graph.compile().ainvoke({"messages": data["messages"]}, {"recursion_limit": 16})
        except GraphRecursionError:  # what the model does wrong is worth 0, not a failure
            return 0.0
        return 1.0 / len(tried) if answer in tried else 0.0
