"""A stand-in for an inference server: the native protocol, and answers after a drawn time.

    python benchmark/generation_stand_in.py --mean-s 5        # prints {"port": ...} and serves

In place of a model it waits: a sample lasts a time drawn uniformly from 0 to twice the mean, and a
group is answered at the first decode step (20 ms) after its last sample. What a client pays for
(HTTP, frames of real length, versions that move with the weights) is there; what a model costs is
not. A process of its own, so
that it takes no time from the core of whoever is measured against it.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
from collections import defaultdict

from aiohttp import web
from pydantic_core import from_json

from areal.engine.native.frames import FRAMES, encode_frames
from areal.engine.native.sequence import Finished
from areal.engine.native.wire import Reply, decode_requests

STEP_S = 0.02


class StandIn:
    def __init__(self, mean_s: float, num_tokens: int) -> None:
        self._mean_s = mean_s
        self._num_tokens = num_tokens
        self._order = itertools.count()  # between answers that are due together
        self._due: list[tuple[float, int, asyncio.Queue[list[str]], list[str]]] = []
        self._has_work = asyncio.Event()
        self._draw = random.Random(0)
        self.set_version(0)

    def set_version(self, version: int) -> None:
        self.version = version
        tokens = [self._draw.randrange(32_000) for _ in range(self._num_tokens)]
        logprobs = [-self._draw.random() for _ in tokens]
        finished = Finished("", tokens, logprobs, [version] * len(tokens), "stop")
        self._reply = Reply(finished, latency=self._mean_s, ttft=0.0)
        # Encoded once; the rid is the last part of a frame, behind its lengths.
        self._frames: dict[int, bytes] = {}

    async def generate(self, http: web.Request) -> web.StreamResponse:
        groups: dict[str, list[str]] = defaultdict(list)
        for request in decode_requests(await http.read()):
            groups[request.group or request.rid].append(request.rid)
        finished: asyncio.Queue[list[str]] = asyncio.Queue()
        now = asyncio.get_running_loop().time()
        for rids in groups.values():
            due = now + max(self._draw.uniform(0, 2 * self._mean_s) for _ in rids)
            heapq.heappush(self._due, (due, next(self._order), finished, rids))
        self._has_work.set()
        answer = web.StreamResponse(headers={"Content-Type": FRAMES})
        await answer.prepare(http)
        missing = len(groups)
        while missing:
            ended = [await finished.get()]
            while not finished.empty():
                ended.append(finished.get_nowait())
            missing -= len(ended)
            await answer.write(b"".join(self._frame(rid) for rids in ended for rid in rids))
        return answer

    async def step_for_ever(self) -> None:
        while True:
            await self._has_work.wait()  # one that has nothing to do takes no time from others
            await asyncio.sleep(STEP_S)
            now = asyncio.get_running_loop().time()
            while self._due and self._due[0][0] <= now:
                _, _, finished, rids = heapq.heappop(self._due)
                finished.put_nowait(rids)
            if not self._due:
                self._has_work.clear()

    def _frame(self, rid: str) -> bytes:
        size = len(rid)
        if size not in self._frames:
            self._reply.finished.rid = "x" * size
            self._frames[size] = encode_frames([self._reply])[:-size]
        return self._frames[size] + rid.encode()

    async def update_weights(self, http: web.Request) -> web.Response:
        self.set_version(from_json(await http.read())["version"])
        return web.json_response({})

    async def health(self, http: web.Request) -> web.Response:
        return web.json_response({"version": self.version})


async def listen(stand_in: StandIn) -> int:
    """The port of loopback that it answers on."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", stand_in.generate)
    app.router.add_post("/update_weights", stand_in.update_weights)
    app.router.add_get("/health", stand_in.health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    return runner.addresses[0][1]


async def serve(stand_in: StandIn) -> None:
    print(json.dumps({"port": await listen(stand_in)}), flush=True)
    await stand_in.step_for_ever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mean-s", type=float, default=5.0)
    parser.add_argument("--num-tokens", type=int, default=256)
    args = parser.parse_args()
    asyncio.run(serve(StandIn(args.mean_s, args.num_tokens)))


if __name__ == "__main__":
    main()
