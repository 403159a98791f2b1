"""An MCP server on pipes, of the standard library alone: honest, or with the fault in argv[1]."""

from __future__ import annotations

import json
import os
import sys
import time

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
TOOLS = [
    {
        "name": "add",
        "description": "The sum.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}},
            "required": ["a"],
        },
    },
    {"name": "count", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "secret", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "fails", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "refuses", "inputSchema": {"type": "object", "properties": {}}},
]


def send(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def misbehave(number):
    match FAULT:
        case "silent":
            time.sleep(900)
        case "half":
            sys.stdout.write('{"jsonrpc": "2.0", "id": ')
            sys.stdout.flush()
            time.sleep(900)
        case "huge":
            sys.stdout.write("x" * (9 << 20))
            sys.stdout.flush()
            time.sleep(900)
        case "dies":
            print("no disk left, or so", file=sys.stderr, flush=True)
            os._exit(3)
        case "wrong_id":
            send({"id": 10**9, "result": {"content": [{"type": "text", "text": "of another"}]}})
            time.sleep(900)
        case "deaf":  # asks on and on, and hears no answer
            os.close(0)
            while True:
                send({"id": "x", "method": "ping"})
                time.sleep(0.05)
        case "no_content":
            send({"id": number, "result": {"answer": 42}})
        case "no_result":
            send({"id": number})
        case "fault":
            send({"id": number, "error": {"code": -32603, "message": "internal"}})
        case "noise":
            print("starting up ...")
            print("[1, 2]", flush=True)
            send({"id": "x", "method": "ping"})
            send({"method": "notifications/message", "params": {}})
            return False
        case _:
            return False
    return True


def answer(method, params, calls):
    if method == "initialize":
        version = "1999-01-01" if FAULT == "old" else params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "x"}}
    if method == "tools/list":
        if "cursor" in params:
            return {"tools": TOOLS[1:]}
        return {"tools": TOOLS[:1], "nextCursor": "2"}
    match params["name"]:
        case "add":
            given = params["arguments"]
            text = str(given["a"] + given.get("b", 0))
        case "count":
            text = str(calls)
        case "secret":
            text = os.environ.get("SOME_API_KEY", "none") + os.environ.get("LEVEL", "")
        case _:
            return {"content": [{"type": "text", "text": "it did not work"}], "isError": True}
    return {"content": [{"type": "text", "text": text}, {"type": "image", "data": ""}]}


def main():
    calls = 0
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or "method" not in request:
            continue
        number, method, params = request["id"], request["method"], request.get("params", {})
        if method == "tools/call":
            calls += 1
            if misbehave(number):
                continue
            if params["name"] == "refuses":
                send({"id": number, "error": {"code": -32602, "message": "not like this"}})
                continue
        send({"id": number, "result": answer(method, params, calls)})


main()
