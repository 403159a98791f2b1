r"""An agent that is a program: Claude Code, Codex, or any other that talks to a model over HTTP.

areal train examples/agents/arithmetic_grpo.yaml workflow=examples.agents.cli_agent.CliAgent \
    "workflow_kwargs={program: codex}" actor.path=Qwen/Qwen3-0.6B gconfig.max_new_tokens=512

Each episode has a folder with the question in question.txt; its reward is 1 if the program leaves
the right number in answer.txt. The program gets only the environment it needs: what it runs is
written by the model. It is as free as you are, so train in a container or on a machine of its own.
"""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROMPT = "Answer the question in question.txt: write the number, and nothing else, to answer.txt."
COMMANDS = {
    "claude": [
        *("claude", "--print", "--model", "policy", "--tools", "Bash", "--allowedTools", "Bash"),
        *("--max-turns", "8", "{prompt}"),
    ],
    "codex": [
        *("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        *("--config", "model_provider=areal", "--config", "model_providers.areal.name=areal"),
        *("--config", "model_providers.areal.base_url={session_url}/v1"),
        *("--config", "model_providers.areal.wire_api=responses", "--model", "policy", "{prompt}"),
    ],
}


class CliAgent:
    """`program`: a name in COMMANDS, or a command with the same places to fill."""

    def __init__(self, program: str | Sequence[str], prompt: str = PROMPT) -> None:
        self.command = COMMANDS[program] if isinstance(program, str) else program
        self.prompt = prompt

    async def run(self, data: dict, *, base_url: str, api_key: str, **extra) -> float:
        # The key in the address: every client can be given another address.
        session_url = f"{base_url.removesuffix('/v1')}/sessions/{api_key}"
        with tempfile.TemporaryDirectory(prefix="episode-") as name:
            folder = Path(name)
            (folder / "question.txt").write_text(data["messages"][-1]["content"])
            values = {"prompt": self.prompt, "session_url": session_url}
            process = await asyncio.create_subprocess_exec(
                *(part.format(**values) for part in self.command),
                cwd=folder,
                env=environment(session_url, folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                said, _ = await process.communicate()
            finally:
                if process.returncode is None:  # the episode took too long
                    os.killpg(process.pid, 9)
            if process.returncode != 0:  # a failure, to be tried again: not a wrong answer
                raise RuntimeError(f"{self.command[0]} failed: {said.decode()[-2000:]}")
            answer = folder / "answer.txt"
            return float(answer.is_file() and answer.read_text().strip() == data["answer"])


def environment(session_url: str, home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_BASE_URL": f"{session_url}/v1",
        "OPENAI_API_KEY": "in-the-address",
        "ANTHROPIC_BASE_URL": session_url,
        "ANTHROPIC_API_KEY": "in-the-address",
        # Titles of sessions, telemetry: calls that are no part of the task.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
