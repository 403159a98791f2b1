"""Ready tools over a sandbox session: Python, shell and files.

class Coder:
    async def reset(self, row):
        self.session = await Session.start()
        self.tools = sandbox_tools(self.session)
        return row["task"]

    async def close(self):
        await self.session.close()
"""

from __future__ import annotations

from areal.environments.tools import Tool, ToolError
from areal.sandbox.session import Session


def sandbox_tools(session: Session) -> list[Tool]:
    """python, shell, read_file and write_file, for the model to call."""

    async def python(code: str) -> str:
        """Run Python code in the workspace and return what it prints."""
        return (await session.python(code)).text

    async def shell(command: str) -> str:
        """Run a shell command in the workspace and return its output."""
        return (await session.shell(command)).text

    async def read_file(path: str) -> str:
        """The text of a file."""
        try:
            return (await session.read_file(path)).decode(errors="backslashreplace")
        except OSError as error:
            raise ToolError(str(error)) from None

    async def write_file(path: str, text: str) -> str:
        """Write a file, with its folders."""
        try:
            await session.write_file(path, text.encode(errors="backslashreplace"))
        except OSError as error:
            raise ToolError(str(error)) from None
        return f"wrote {path}"

    return [Tool.of(function) for function in (python, shell, read_file, write_file)]
