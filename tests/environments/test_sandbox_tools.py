"""The ready tools of a sandbox session, called as a model calls them."""

from __future__ import annotations

import json

from sandbox_support import needs_sandbox

from areal.environments.sandbox_tools import sandbox_tools
from areal.environments.tools import answer_call, tools_of
from areal.sandbox.session import Session

pytestmark = needs_sandbox


async def run(function, arguments):
    return await function(**arguments)


async def test_python_shell_and_files_share_a_workspace():
    async with await Session.start() as session:
        tools = tools_of(sandbox_tools(session))

        async def call(name, **arguments):
            return await answer_call(tools, name, json.dumps(arguments), run)

        assert await call("write_file", path="a/b.py", text="print(6 * 7)") == "wrote a/b.py"
        assert await call("shell", command="python3 a/b.py") == "42"
        assert await call("python", code="print(open('a/b.py').read())") == "print(6 * 7)"
        assert await call("read_file", path="a/b.py") == "print(6 * 7)"
        assert (await call("read_file", path="none")).startswith("error: none: ")
        assert (await call("write_file", path="/usr/x", text="")).startswith("error: /usr/x: ")
        assert (await call("python", code="1/0")).endswith("[it ended with exit code 1]")
    assert set(tools) == {"python", "shell", "read_file", "write_file"}
    assert tools["shell"].schema["function"]["parameters"]["required"] == ["command"]
