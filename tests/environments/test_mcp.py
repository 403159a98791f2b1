"""Tools of MCP servers over pipes and HTTP: what the model gets, and what a server can do wrong."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from aiohttp import web
from scripted_engine import ScriptedEngine
from tiny_tokenizer import byte_tokenizer

from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.mcp import McpServer, mcp_servers_of
from areal.environments.calls import Calls
from areal.environments.interface import EnvError
from areal.environments.mcp.toolbox import Toolbox
from areal.environments.tools import ToolError, answer_call, tools_of
from areal.workflow.env import EnvWorkflow

SCRIPT = str(Path(__file__).parents[1] / "data" / "mcp_server.py")
WAIT_S = 900.0
OVER = web.AppKey("over", asyncio.Event)


def on_pipes(fault: str = "", **options) -> McpServer:
    return McpServer(command=sys.executable, args=(SCRIPT, fault), **options)


class Episode:
    """The tools of one episode, called as the workflow calls them."""

    def __init__(self, servers: dict[str, McpServer], timeout_s: float = WAIT_S) -> None:
        self.toolbox = Toolbox(servers)
        self.calls = Calls("tools", timeout_s, max_concurrent=1)

    async def __aenter__(self):
        self.opened = await self.calls.run("mcp_servers", self.toolbox.open)
        self.tools = tools_of(self.opened.tools)
        return self

    async def __aexit__(self, *_):
        self.toolbox.close()
        await self.calls.close(self.opened)

    async def call(self, name: str, **arguments) -> str:
        async def run(function, values):
            return await self.calls.run_tool(name, function, values)

        return await answer_call(self.tools, name, json.dumps(arguments), run)


async def test_tools_over_pipes(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "of ours")
    async with Episode({"one": on_pipes(env={"LEVEL": "3"})}) as episode:
        assert list(episode.tools) == ["add", "count", "secret", "fails", "refuses"]
        assert episode.tools["add"].description == "The sum."
        assert await episode.call("add", a=2, b=3) == "5\n[image]"
        assert "must be of type integer" in await episode.call("add", a="2")
        assert await episode.call("fails") == "error: it did not work"
        assert await episode.call("refuses") == "error: not like this"
        assert await episode.call("secret") == "none3\n[image]"


async def test_an_episode_has_a_server_of_its_own_unless_it_is_shared():
    for shared, expected in ((False, ["1", "1"]), (True, ["1", "2"])):
        toolbox = Toolbox({"one": on_pipes(shared=shared)})
        counts = []
        for _ in range(2):
            episode = await toolbox.open()
            [tool] = [tool for tool in episode.tools if tool.name == "count"]
            counts.append((await tool.function()).split("\n")[0])
            await episode.close()
        toolbox.close()
        assert counts == expected


async def test_noise_between_answers_is_skipped():
    async with Episode({"one": on_pipes("noise")}) as episode:
        assert await episode.call("add", a=1) == "1\n[image]"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("silent", "took longer than 0.5 s"),
        ("half", "took longer than 0.5 s"),
        ("wrong_id", "took longer than 0.5 s"),
        ("huge", "wrote a line of more than 8 MiB"),
        ("dies", "ended with exit code 3; its last output:\nno disk left, or so"),
        ("deaf", "was ended by signal SIGKILL"),
        ("no_content", "expected a list 'content'"),
        ("no_result", "expected a list 'content'"),
        ("fault", "add failed: internal"),
    ],
)
async def test_a_fault_of_the_server_fails_the_episode(fault, says):
    async with Episode({"one": on_pipes(fault)}) as episode:
        if "longer" in says:
            episode.calls = Calls("tools", 0.5, max_concurrent=1)
        with pytest.raises(EnvError, match=says):
            await episode.call("add", a=1)


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ({"one": on_pipes("old")}, "MCP server one: speaks version '1999-01-01'"),
        ({"one": McpServer(command="/no/such")}, "MCP server one: cannot start '/no/such'"),
        ({"one": McpServer(url="http://127.0.0.1:1/mcp")}, "MCP server one: http://127"),
        ({"one": on_pipes(), "two": on_pipes()}, "one and two both offer a tool 'add'"),
    ],
)
async def test_servers_that_cannot_be_used(servers, says):
    toolbox = Toolbox(servers)
    with pytest.raises(EnvError, match=says):
        await toolbox.open()
    toolbox.close()


async def test_a_shared_server_that_died_is_started_again():
    toolbox = Toolbox({"one": on_pipes("dies", shared=True)})
    for _ in range(2):
        episode = await toolbox.open()
        with pytest.raises(EnvError, match="exit code 3"):
            await episode.tools[0].function(a=1)
    toolbox.close()


async def test_a_shared_server_that_hangs_is_replaced_and_ends_with_its_episodes():
    toolbox = Toolbox({"one": on_pipes("silent", shared=True)})
    first, second = await toolbox.open(), await toolbox.open()
    stuck = first.shared[0].link
    with pytest.raises(EnvError, match="longer than 0.5 s"):
        await Calls("tools", 0.5, max_concurrent=1).run_tool(
            "add", first.tools[0].function, {"a": 1}
        )
    third = await toolbox.open()
    assert second.shared[0].link is stuck and third.shared[0].link is not stuck
    await first.close()
    assert not stuck.has_ended  # another episode may still hope for an answer
    await second.close()
    assert stuck.has_ended and not third.shared[0].link.has_ended
    await third.close()
    toolbox.close()


class HttpServer:
    """Streamable HTTP; `reply` makes the response to tools/call."""

    def __init__(self, reply=None, streams: bool = False) -> None:
        self.reply, self.streams = reply, streams
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.answers: list[dict] = []

    async def __aenter__(self) -> McpServer:
        app = web.Application()
        app[OVER] = self.over = asyncio.Event()
        app.router.add_route("*", "/mcp", self.handle)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        return McpServer(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "k"})

    async def __aexit__(self, *_):
        self.over.set()
        await self.runner.cleanup()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            self.seen.append(("DELETE", dict(request.headers)))
            return web.Response()
        message = await request.json()
        if "method" not in message:
            self.answers.append(message)
            return web.Response(status=202)
        self.seen.append((message["method"], dict(request.headers)))
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "tools/call" and self.reply is not None:
            return await self.reply(request, message)
        result = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}},
            "tools/list": {
                "tools": [{"name": "echo", "inputSchema": {"type": "object", "properties": {}}}]
            },
            "tools/call": {"content": [{"type": "text", "text": "déjà vu"}]},
        }[message["method"]]
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        headers = {"Mcp-Session-Id": "s1"} if message["method"] == "initialize" else {}
        if not self.streams:
            return web.json_response(reply, headers=headers)
        events = [{"jsonrpc": "2.0", "id": 7, "method": "ping"}, {"no": "answer"}, reply]
        body = "".join(f": hi\r\nevent: message\r\ndata: {json.dumps(e)}\r\n\r\n" for e in events)
        return web.Response(text=body, content_type="text/event-stream", headers=headers)


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_over_http(streams):
    server = HttpServer(streams=streams)
    async with server as config, Episode({"web": config}) as episode:
        assert await episode.call("echo") == "déjà vu"
    methods = [method for method, _ in server.seen]
    handshake = ["initialize", "notifications/initialized", "tools/list"]
    assert methods == [*handshake, "tools/call", "DELETE"]
    for _, headers in server.seen[1:]:
        assert headers["Mcp-Session-Id"] == "s1" and headers["X-Key"] == "k"
        assert headers["MCP-Protocol-Version"] == "2025-06-18"
    assert all(answer["result"] == {} for answer in server.answers)
    assert bool(server.answers) == streams


async def answer_of_nobody(request, message):
    return web.json_response({"jsonrpc": "2.0", "id": 999, "result": {}})


async def not_json(request, message):
    return web.Response(text="<html>")


async def an_error(request, message):
    return web.Response(status=503, text="come back later")


async def elsewhere(request, message):
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/mcp")


async def cut_stream(request, message):
    return web.Response(text='data: {"jsonrpc"', content_type="text/event-stream")


async def too_much(request, message):
    return web.Response(body=b"data: " + b"x" * (9 << 20), content_type="text/event-stream")


async def never(request, message):
    await request.app[OVER].wait()
    return web.Response()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (answer_of_nobody, "does not answer the request"),
        (not_json, "does not answer the request"),
        (an_error, "HTTP 503: come back later"),
        (elsewhere, "HTTP 307"),
        (cut_stream, "ended without an answer"),
        (too_much, "more than 8 MiB"),
        (never, "took longer than 0.5 s"),
    ],
)
async def test_a_fault_over_http_fails_the_episode(reply, says):
    server = HttpServer(reply)
    async with server as config, Episode({"web": config}) as episode:
        if reply is never:
            episode.calls = Calls("tools", 0.5, max_concurrent=1)
        with pytest.raises(EnvError, match=says):
            await episode.call("echo")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": "npx"}, "mcp_servers.a must have a `command`"),
        ({"a": {}}, "mcp_servers.a must have a `command`"),
        ({"a": {"command": "x", "url": "http://x"}}, "and not both"),
        ({"a": {"url": "ftp://x"}}, "mcp_servers.a.url must begin with http"),
        ({"a": {"command": "x", "arg": []}}, "mcp_servers.a.arg: unknown key"),
        ({"a": {"command": "x", "args": "-y"}}, "mcp_servers.a.args must be a list"),
        ({"a": {"url": "http://x", "env": {"A": 1}}}, "mcp_servers.a.env goes with command"),
        ({"a": {"command": "x", "shared": "no"}}, "mcp_servers.a.shared must be true or false"),
    ],
)
def test_a_config_that_cannot_be_meant(given, says):
    with pytest.raises(ValueError, match=says):
        mcp_servers_of(given)


CHAT = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>]{% endif %}"
    "{% for m in messages %}({{ m.role }}:{{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant:{% endif %}"
)


async def test_the_model_calls_a_tool_of_a_server():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>'
    engine = ScriptedEngine(tokenizer, [call, "1"])
    workflow = EnvWorkflow(
        "sample_envs.Count",
        GenerationHyperparameters(max_new_tokens=99, max_tokens=4096),
        tokenizer,
        env_kwargs={"last": 1},
        mcp_servers={"one": {"command": sys.executable, "args": [SCRIPT]}},
        timeout_s=WAIT_S,
    )
    result = await workflow.arun_episode(engine, {"seed": 5})
    workflow.close()
    assert engine.asked[0].startswith("[add count secret fails refuses <tool_call>]")
    assert "(tool:42\n[image]<|eos|>" in engine.asked[1]
    assert result["rewards"].tolist() != [0.0]
    assert not os.environ.get("LEVEL")


async def test_a_tool_error_is_told_and_no_failure():
    async with Episode({"one": on_pipes()}) as episode:
        with pytest.raises(ToolError, match="it did not work"):
            await episode.tools["fails"].function()
