"""Groups of samples against a real native server, and against one that breaks."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import hang_up, scripted_server
from tiny import write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.frames import FRAMES, encode_frames
from areal.engine.native.sequence import Finished
from areal.engine.native.wire import Reply
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.engine.remote.server_control import ServerError

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    child, address = launch_native_server(model, token=TOKEN, num_pages=800, setup_timeout_s=900)
    yield address
    child.terminate()


@pytest.fixture
async def engine(address):
    engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=300, setup_timeout_s=300)
    engine.initialize()
    yield engine
    engine.continue_generation()
    await asyncio.to_thread(engine.destroy)


def request(seed=1, ids=(2, 3), max_new_tokens=4):
    gconfig = GenerationHyperparameters(
        max_new_tokens=max_new_tokens, ignore_eos=True, seed=seed, n_samples=8
    )
    return ModelRequest(input_ids=list(ids), gconfig=gconfig)


async def test_a_group_is_one_entry_and_gives_what_its_requests_give(engine):
    group = await engine.agenerate_group(request(ids=(2, 4), max_new_tokens=6), [1, 2, 3])
    alone = [await engine.agenerate(request(seed, (2, 4), 6)) for seed in (1, 2, 3)]
    for sample, reply in zip(group, alone, strict=True):
        assert sample.tokens.tolist() == reply.output_tokens
        assert sample.logprobs.tolist() == reply.output_logprobs
        assert sample.versions.tolist() == reply.output_versions
        assert sample.stop_reason == reply.stop_reason
    async with scripted_server(group_frames) as (address, seen):
        await group_from(address, 8)
    assert [len(entries) for entries in seen] == [1] and len(seen[0][0]["further"]) == 7


def group_frames(entries, count=None, change=None):
    """The first `count` samples of every group, as the server writes them."""
    replies = []
    for entry in entries:
        further = [(one["rid"], one["seed"]) for one in entry.get("further", [])]
        for rid, seed in [(entry["rid"], entry["gconfig"]["seed"]), *further]:
            finished = Finished(rid, [seed], [-0.5], [0], "stop")
            replies.append(Reply(finished, latency=0.2, ttft=0.1))
    data = encode_frames(replies[:count])
    if change is not None:
        data = change(data)
    return b"HTTP/1.1 200 OK\r\nContent-Type: " + FRAMES.encode() + b"\r\n\r\n" + data


async def group_from(address, count, **options):
    options = {"request_timeout_s": 5, "request_retries": 2, **options}
    engine = NativeRemoteEngine([address], TOKEN, **options)
    try:
        return await engine.agenerate_group(request(), range(count))
    finally:
        await asyncio.to_thread(engine.destroy)


async def test_only_lost_samples_of_a_group_are_sent_again():
    async with scripted_server(lambda e: group_frames(e, 3), hang_up, group_frames) as (
        address,
        seen,
    ):
        samples = await group_from(address, 5)
    assert [sample.tokens.tolist() for sample in samples] == [[seed] for seed in range(5)]
    assert [entries[0]["gconfig"]["seed"] for entries in seen] == [0, 3, 3]


@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-7], lambda data: b"\xff" * 60, lambda data: data[:9] + data[10:] + b"x"],
)
async def test_broken_frames_are_asked_for_again_then_raised(change):
    def broken(entries):
        return group_frames(entries, change=change)

    async with scripted_server(broken, group_frames) as (address, _):
        samples = await group_from(address, 2)
    assert [sample.tokens.tolist() for sample in samples] == [[0], [1]]
    async with scripted_server(broken) as (address, _):
        samples = await group_from(address, 2, request_retries=1)
    assert isinstance(samples[-1], ServerError) and "after 2 attempts" in str(samples[-1])


async def test_a_cancelled_group_frees_its_generation(engine):
    engine.pause_generation()
    call = asyncio.create_task(
        engine.agenerate_group(request(max_new_tokens=200, ids=(2, 9)), range(4))
    )
    await until(lambda: engine.stats()["waiting"] + engine.stats()["running"] >= 4)
    call.cancel()
    engine.continue_generation()
    await until(lambda: engine.stats()["waiting"] + engine.stats()["running"] == 0)


async def until(condition):
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)
