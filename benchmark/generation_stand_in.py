"""A stand-in for an inference server: the native protocol, and answers after a drawn time.

    python benchmark/generation_stand_in.py --mean-s 5        # prints {"port": ...} and serves

In place of a model it waits: every request is answered at the first decode step (20 ms) after a
time drawn uniformly from 0 to twice the mean. What a client pays for (HTTP, JSON of real length,
versions that move with the weights) is there; what a model costs is not. A process of its own, so
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
from pydantic_core import from_json, to_json

STEP_S = 0.02


class StandIn:
    def __init__(self, mean_s: float, num_tokens: int) -> None:
        self._mean_s = mean_s
        self._num_tokens = num_tokens
        self._order = itertools.count()  # between answers that are due together
        self._due: list[tuple[float, int, asyncio.Queue[str], str]] = []
        self._draw = random.Random(0)
        self.set_version(0)

    def set_version(self, version: int) -> None:
        tokens = [self._draw.randrange(32_000) for _ in range(self._num_tokens)]
        answer = {
            "output_tokens": tokens,
            "output_logprobs": [-self._draw.random() for _ in tokens],
            "output_versions": [version] * len(tokens),
            "stop_reason": "stop",
            "latency": self._mean_s,
            "ttft": 0.0,
        }
        self._answer = b"," + to_json(answer)[1:] + b"\n"

    async def generate(self, http: web.Request) -> web.StreamResponse:
        requests = from_json(await http.read())["requests"]
        finished: asyncio.Queue[str] = asyncio.Queue()
        now = asyncio.get_running_loop().time()
        for request in requests:
            due = now + self._draw.uniform(0, 2 * self._mean_s)
            heapq.heappush(self._due, (due, next(self._order), finished, request["rid"]))
        answer = web.StreamResponse()
        await answer.prepare(http)
        missing = len(requests)
        while missing:
            rids = [await finished.get()]
            while not finished.empty():
                rids.append(finished.get_nowait())
            missing -= len(rids)
            await answer.write(b"".join(self._line(rid) for rid in rids))
        return answer

    async def step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            now = asyncio.get_running_loop().time()
            ended: dict[asyncio.Queue[str], list[str]] = defaultdict(list)
            while self._due and self._due[0][0] <= now:
                _, _, finished, rid = heapq.heappop(self._due)
                ended[finished].append(rid)
            for finished, rids in ended.items():
                for rid in rids:
                    finished.put_nowait(rid)

    def _line(self, rid: str) -> bytes:
        return b'{"rid":' + to_json(rid) + self._answer

    async def update_weights(self, http: web.Request) -> web.Response:
        self.set_version(from_json(await http.read())["version"])
        return web.json_response({})


async def serve(stand_in: StandIn) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", stand_in.generate)
    app.router.add_post("/update_weights", stand_in.update_weights)
    app.router.add_get("/health", lambda http: _healthy())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await stand_in.step_for_ever()


async def _healthy() -> web.Response:
    return web.json_response({"version": 0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mean-s", type=float, default=5.0)
    parser.add_argument("--num-tokens", type=int, default=256)
    args = parser.parse_args()
    asyncio.run(serve(StandIn(args.mean_s, args.num_tokens)))


if __name__ == "__main__":
    main()
