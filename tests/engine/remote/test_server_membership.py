"""Servers that die, join and leave under load: every request ends once and keeps the tokens it had,
every token is of the version it names, and nobody serves other weights than the rest."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from engine.native.test_native_engine import full_forward_logprobs
from tiny import tiny_model, write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.remote.native import (
    PROGRESS_TOKENS,
    NativeRemoteEngine,
    launch_native_server,
)
from areal.engine.remote.server_control import ControlClient, ServerError
from areal.engine.train.export import send_weights
from areal.weight_sync.transports import PublicationRoot

TOKEN = "token-of-this-run"
WAIT_S = 900
LONG = {"max_position_embeddings": 2048}
# One is killed: test_forked_children.py has how it ends then.
pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def servers(tmp_path_factory, forked_children):
    """(process, address) of three: one is killed, one stays, one comes later."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"), **LONG)

    def launch(_):
        return launch_native_server(model, token=TOKEN, num_pages=1000, setup_timeout_s=WAIT_S)

    with ThreadPoolExecutor(3) as pool:
        started = list(pool.map(launch, range(3)))
    yield started
    for child, _ in started:
        child.terminate()


@pytest.fixture
def root(tmp_path):
    with PublicationRoot("shm", run_name="pool", disk_root=tmp_path) as root:
        yield root


@pytest.fixture
async def open_engine():
    opened = []

    def open_(*addresses):
        opened.append(NativeRemoteEngine(list(addresses), TOKEN, request_timeout_s=WAIT_S))
        opened[-1].initialize()
        return opened[-1]

    yield open_
    for engine in opened:
        await asyncio.to_thread(engine.destroy)


def requests(count, num_tokens):
    """Pairs of samples of one prompt."""
    return [
        ModelRequest(
            input_ids=[2, 3 + number // 2],
            gconfig=GenerationHyperparameters(
                max_new_tokens=num_tokens, ignore_eos=True, seed=number
            ),
        )
        for number in range(count)
    ]


def send(engine, root, version, seed):
    meta = root.meta(gen_allocation=ModelAllocation.from_str("native:d1")).with_version(version)
    send_weights(engine, meta, tiny_model(seed=seed, **LONG).named_hf_tensors())
    return meta


def control_of(address):
    return ControlClient(address, TOKEN, timeout_s=WAIT_S)


async def wait_for_tokens(address, count):
    """Until each of its requests has so many; then it is held there."""
    control, deadline = control_of(address), time.monotonic() + WAIT_S
    start = None
    while True:
        stats = await asyncio.to_thread(control.get, "/stats")
        start = stats["tokens_generated"] if start is None else start
        if stats["running"] and stats["tokens_generated"] - start > count * stats["running"]:
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
    await asyncio.to_thread(control.post, "/pause")


async def test_the_requests_of_a_killed_server_go_on_at_another_with_their_tokens(
    servers, root, open_engine
):
    (doomed, first), (_, second) = servers[:2]
    engine = open_engine(first, second)
    await asyncio.to_thread(send, engine, root, 5, 3)
    num_tokens = 1200
    sent = requests(8, num_tokens)
    calls = [asyncio.create_task(engine.agenerate(request)) for request in sent]
    await asyncio.gather(*[wait_for_tokens(each, PROGRESS_TOKENS) for each in (first, second)])
    await asyncio.to_thread(engine.pause_generation)
    os.kill(doomed.pid, signal.SIGKILL)
    await asyncio.to_thread(send, engine, root, 6, 4)
    assert engine.servers == [second]
    await asyncio.to_thread(engine.continue_generation)
    replies = await asyncio.gather(*calls)

    models = {5: tiny_model(seed=3, **LONG), 6: tiny_model(seed=4, **LONG)}
    for request, reply in zip(sent, replies, strict=True):
        versions = reply.output_versions
        num_old = versions.count(5)
        assert versions == [5] * num_old + [6] * (num_tokens - num_old)
        assert num_old >= PROGRESS_TOKENS and num_old < num_tokens
        expected = {
            version: full_forward_logprobs(model, request.input_ids, reply.output_tokens)
            for version, model in models.items()
        }
        of_each = [expected[version][index] for index, version in enumerate(versions)]
        assert reply.output_logprobs == pytest.approx(of_each, abs=1e-4)
        assert reply.stop_reason == "length" and 0 < reply.ttft <= reply.latency
    stats = await asyncio.to_thread(engine.stats)
    assert stats["requests_resent"] == 4 and stats["servers"] == 1
    kept = [reply.output_versions.count(5) for reply in replies]
    assert sum(count % PROGRESS_TOKENS == 0 for count in kept) >= 4  # of those sent again
    assert stats["tokens_kept"] >= 4 * PROGRESS_TOKENS

    # A copy that knows of the dead one goes on without it, too.
    copy = pickle.loads(pickle.dumps(NativeRemoteEngine([first, second], TOKEN)))
    await asyncio.to_thread(send, copy, root, 7, 3)
    assert copy.servers == [second] and await asyncio.to_thread(engine.get_version) == 7
    gone = NativeRemoteEngine([first], TOKEN, request_retries=1)
    with pytest.raises(ServerError, match=f"{first}.*Refused"):
        await asyncio.to_thread(gone.get_version)


async def test_a_server_joins_with_the_weights_that_serve_and_another_leaves(
    servers, root, open_engine
):
    (_, steady), (_, newcomer) = servers[1:]
    engine = open_engine(steady)
    await asyncio.to_thread(send, engine, root, 11, 4)
    stranger = open_engine(steady)  # was not there when the weights came
    with pytest.raises(RuntimeError, match="has version 0 of the weights, the others serve 11"):
        await asyncio.to_thread(stranger.join, newcomer)
    assert stranger.servers == [steady]

    running = [asyncio.create_task(engine.agenerate(one)) for one in requests(12, 40)]
    await asyncio.to_thread(engine.join, newcomer)
    assert (await asyncio.to_thread(control_of(newcomer).get, "/health"))["version"] == 11
    with pytest.raises(ValueError, match="already"):
        await asyncio.to_thread(engine.join, newcomer)
    running += [asyncio.create_task(engine.agenerate(one)) for one in requests(24, 40)]
    await asyncio.to_thread(send, engine, root, 12, 0)
    running += [asyncio.create_task(engine.agenerate(one)) for one in requests(24, 40)]
    await asyncio.sleep(0)  # they go out, to both
    await asyncio.to_thread(engine.leave, steady)
    left = await asyncio.to_thread(control_of(steady).get, "/stats")
    assert engine.servers == [newcomer] and left["running"] == left["waiting"] == 0
    running += [asyncio.create_task(engine.agenerate(one)) for one in requests(6, 40)]
    replies = await asyncio.gather(*running)
    assert all(len(reply.output_tokens) == 40 for reply in replies)
    for reply in replies:
        assert set(reply.output_versions) <= {11, 12}
        assert reply.output_versions == sorted(reply.output_versions)
    assert all(set(reply.output_versions) == {12} for reply in replies[-30:])
    # One request, one version: the same tokens, whoever drew them.
    for reply, again in zip(replies[36:60], replies[-6:], strict=False):
        assert reply.output_tokens == again.output_tokens
    with pytest.raises(ValueError, match="the last one"):
        await asyncio.to_thread(engine.leave, newcomer)
    with pytest.raises(ValueError, match="is not one of"):
        await asyncio.to_thread(engine.leave, steady)
    # Who was away when an update came has it before the next request.
    meta = await asyncio.to_thread(send, engine, root, 13, 4)
    await asyncio.to_thread(engine.join, steady, meta)
    assert await asyncio.to_thread(engine.get_version) == 13
    copy = open_engine(newcomer)  # as that of a rank, from before the join
    meta = await asyncio.to_thread(send, copy, root, 14, 0)
    assert await asyncio.to_thread(engine.get_version) == 13
    await asyncio.to_thread(engine.note_weights, meta)
    assert await asyncio.to_thread(engine.get_version) == 14


@pytest.mark.parametrize(("mode", "version"), [("xccl", 40), ("delta", 50)])
async def test_a_server_joins_with_the_next_weights_where_nothing_holds_the_live_ones(
    servers, open_engine, tmp_path, mode, version
):
    (_, first), (_, second) = servers[1:]
    engine = open_engine(first)
    with PublicationRoot(mode, run_name=f"next-{mode}", disk_root=tmp_path) as root:

        def publish(version, seed):
            """As a trainer does it."""
            engine.expect_weights(version)
            engine.note_weights(send(engine, root, version, seed))

        await asyncio.to_thread(publish, version, 11)
        join = partial(engine.join_with_next_weights, timeout_s=WAIT_S)
        with pytest.raises(RuntimeError, match=r"no weights were sent for 0\.1 s"):
            await asyncio.to_thread(join, second, timeout_s=0.1)
        with pytest.raises(ValueError, match="is one of this engine's already"):
            await asyncio.to_thread(join, first)
        joining = asyncio.create_task(asyncio.to_thread(join, second))
        while engine.member_states().get(second) != "joining":
            assert not joining.done()
            await asyncio.sleep(0.01)
        assert engine.servers == [first]
        assert await asyncio.to_thread(engine.get_version) == version
        await asyncio.to_thread(publish, version + 1, 12)
        await joining
        assert engine.servers == [first, second] and await asyncio.to_thread(engine.get_version)
        both = await asyncio.to_thread(engine.weight_checksums)
        assert both[first] == both[second]
        replies = await asyncio.gather(*map(engine.agenerate, requests(8, 20)))
        assert {v for reply in replies for v in reply.output_versions} == {version + 1}
        await asyncio.to_thread(publish, version + 2, 13)  # both are receivers
        assert await asyncio.to_thread(engine.get_version) == version + 2
