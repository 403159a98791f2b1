"""Claude Code, as its SDK for Python starts it: `python claude_code.py PROMPT`."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, query


async def main(prompt: str) -> None:
    options = ClaudeAgentOptions(
        model="policy", tools=["Bash"], allowed_tools=["Bash"], max_turns=8
    )
    async for message in query(prompt=prompt, options=options):
        print(message)


asyncio.run(main(sys.argv[1]))
