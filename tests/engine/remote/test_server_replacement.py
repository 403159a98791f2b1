"""A killed server is replaced: with its weights, without losing a request, within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import time

import pytest
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.engine_api import EngineLostError
from areal.api.io_struct import ModelRequest
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.engine.remote.server_process import ServerProcess
from areal.engine.train.export import send_weights
from areal.weight_sync.transports import PublicationRoot

TOKEN = "token-of-this-run"
pytestmark = pytest.mark.usefixtures("forked_children")


class Launches:
    """Starts real servers and remembers their process ids."""

    def __init__(self, model, log) -> None:
        self._model, self._log = model, log
        self.pids: list[int] = []
        self._address = ""
        self.look = list  # called at each launch, for `seen`
        self.seen: list = []

    def __call__(self):
        self.seen.append(self.look())
        child, address = launch_native_server(
            self._model, token=TOKEN, num_pages=200, log_path=self._log, setup_timeout_s=900
        )
        self.pids.append(child.pid)
        self._address = address
        return child, address

    def kill(self) -> None:
        """Returns when nobody listens any more: a forked server ends a moment after its client."""
        host, _, port = self._address.rpartition(":")
        os.kill(self.pids[-1], signal.SIGKILL)
        deadline = time.monotonic() + 300
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                socket.create_connection((host, int(port)), timeout=60).close()
                time.sleep(0.01)


def requests():
    return [
        ModelRequest(
            input_ids=[2, 3 + seed % 2],
            gconfig=GenerationHyperparameters(max_new_tokens=40, ignore_eos=True, seed=seed),
        )
        for seed in range(12)
    ]


async def test_a_killed_server_is_replaced(tmp_path):
    launches = Launches(write_tiny_model(tmp_path / "model"), tmp_path / "server.log")
    process = ServerProcess(launches)
    engine = NativeRemoteEngine(
        [process.address],
        TOKEN,
        request_timeout_s=60,
        request_retries=0,
        processes=[process],
        max_restarts=1,
        address_file=tmp_path / "servers.json",
    )
    engine.initialize()
    launches.look = engine.member_states
    first = process.address
    copy = pickle.loads(pickle.dumps(engine))  # as a rollout worker or a training rank has one
    try:
        with PublicationRoot("disk", run_name="test", disk_root=tmp_path / "weights") as root:
            weights = tiny_model(seed=5).named_hf_tensors()
            meta = root.meta().with_version(3)
            await asyncio.to_thread(send_weights, engine, meta, weights)
            engine.note_weights(meta)
            before = await asyncio.gather(*map(engine.agenerate, requests()))

            # While it generates: all requests come back, from the weights that served.
            await asyncio.to_thread(engine.pause_generation)
            await asyncio.to_thread(engine.offload)
            calls = asyncio.gather(*map(engine.agenerate, requests()))
            await asyncio.sleep(0.2)
            launches.kill()
            await asyncio.sleep(0)
            while len(launches.pids) == 1:
                await asyncio.sleep(0.05)
            # The new one was paused and offloaded, too.
            await asyncio.to_thread(engine.continue_generation)
            assert not calls.done()
            await asyncio.to_thread(engine.onload)
            after = await calls
            assert [r.output_tokens for r in after] == [r.output_tokens for r in before]
            assert {v for r in after for v in r.output_versions} == {3}
            stats = await asyncio.to_thread(engine.stats)
            assert stats["restarts"] == 1 and stats["requests_resent"] == len(after)
            assert launches.seen[-1] == {first: "restarting"}
            assert engine.member_states() == {process.address: "serving"}
            assert engine.member_loads()[process.address]["version"] == 3

            # A copy finds the new one, though nobody has told it.
            assert (await copy.agenerate(requests()[0])).output_tokens == before[0].output_tokens
            assert await asyncio.to_thread(copy.get_version) == 3

            # Another death without an update between: the end, with its cause, for everybody.
            launches.kill()
            for call in (
                asyncio.to_thread(copy.get_version),  # first: the owner sees it by itself
                asyncio.to_thread(engine.get_version),
                engine.agenerate(requests()[0]),
            ):
                with pytest.raises(EngineLostError, match="native server .*by signal SIGKILL"):
                    await call
            assert len(launches.pids) == 2
    finally:
        await asyncio.to_thread(copy.destroy)
        await asyncio.to_thread(engine.destroy)
        process.close()
