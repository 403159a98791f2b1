"""Several stock servers, and updates that a training rank sends: a server that is replaced just
then serves no old weights under the new version."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_checks import RECEIVER, ServerWorld, request
from sglang_server import sglang_python
from tiny import write_tiny_model

from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.server_process import ServerProcess
from areal.engine.remote.sglang import SGLangProtocol, launch_sglang_server
from areal.weight_sync.transports import PublicationRoot

TOKEN = "token-of-this-run"
pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
async def fleet(tmp_path):
    """(the owner's world, the processes of its two servers, newest last)"""
    folders = [write_tiny_model(tmp_path / f"weights{seed}", seed=seed) for seed in (0, 7)]
    python, children = sglang_python(tmp_path), []

    def launch():
        child, address = launch_sglang_server(
            folders[0], python=python, token=TOKEN, dtype="float32", setup_timeout_s=900
        )
        children.append(child)
        return child, address

    with ThreadPoolExecutor(2) as pool:
        processes = await asyncio.to_thread(lambda: list(pool.map(ServerProcess, [launch] * 2)))
    engine = RemoteEngine(
        SGLangProtocol(folders[0]),
        [process.address for process in processes],
        TOKEN,
        processes=processes,
        request_timeout_s=120,
        address_file=tmp_path / "servers.json",
    )
    await asyncio.to_thread(engine.initialize)
    yield ServerWorld(engine, folders, "fleet-test", tolerance=1e-4), children
    await asyncio.to_thread(engine.destroy)
    for process in processes:
        process.close()


def requests(count: int, **options):
    """Of different prompts, so that both servers get some."""
    return [request(ids=(5, 7, 9 + index), seed=index, **options) for index in range(count)]


async def test_a_server_that_dies_after_a_rank_has_sent_the_weights(fleet, tmp_path):
    world, children = fleet
    owner = world.engine
    rank = pickle.loads(pickle.dumps(owner))
    rank.initialize()
    sender = ServerWorld(rank, world.folders, "fleet-test", 1e-4, versions=world.versions)
    early = [asyncio.create_task(owner.agenerate(one)) for one in requests(4, max_new_tokens=240)]
    await asyncio.sleep(0.1)
    with PublicationRoot("disk", run_name="test", disk_root=tmp_path / "published") as root:
        await asyncio.to_thread(owner.expect_weights, 1)
        version = await asyncio.to_thread(sender.publish_in, root)
        os.killpg(children[0].pid, signal.SIGKILL)
        while len(children) == 2 or owner.stats()["servers"] < 2:
            await asyncio.sleep(0.05)  # the owner knows of version 0 only, and starts it with that
        late = [asyncio.create_task(owner.agenerate(one)) for one in requests(4)]
        _, waiting = await asyncio.wait(late, timeout=0.3)
        assert len(waiting) == 4
        meta = root.meta(gen_allocation=RECEIVER).with_version(version)
        await asyncio.to_thread(owner.note_weights, meta)
        replies = await asyncio.gather(*late, *early)
        assert all(reply.output_versions == [1] * 6 for reply in replies[:4])
        world.check_logprobs(replies)
        stats = await asyncio.to_thread(owner.stats)
        assert (stats["servers"], stats["restarts"], stats["version"]) == (2, 1, 1)
    await asyncio.to_thread(rank.destroy)
