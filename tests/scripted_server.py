"""A server of a few lines that says what a script tells it: the network, and dying processes."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager


@asynccontextmanager
async def scripted_server(*scripts):
    """Answers its nth connection with scripts[n] (the last one for all later), then hangs up.

    A script is a function from the requests of the body to the bytes to send. Yields the address
    and the list of exchanges seen, each the list of its requests.
    """
    seen = []

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        body = b"{}" if length is None else await reader.readexactly(int(length[1]))
        seen.append(json.loads(body).get("requests", []))
        script = scripts[min(len(seen), len(scripts)) - 1]
        writer.write(script(seen[-1]))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield "{}:{}".format(*server.sockets[0].getsockname()), seen


def hang_up(entries):
    return b""
