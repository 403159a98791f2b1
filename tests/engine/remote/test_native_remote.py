"""NativeRemoteEngine against real servers, and against a server that breaks in every way it can.

The breaking server is a few lines of asyncio: it stands for the network and for dying processes.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from scripted_server import hang_up, scripted_server
from server_checks import Told
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.engine.remote.server_control import ServerError
from areal.engine.train.export import send_weights
from areal.weight_sync.transports import PublicationRoot

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def address(model):
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


@pytest.fixture(scope="module")
def local(model):
    engine = NativeLocalEngine(model, num_pages=800)
    engine.initialize()
    yield engine
    engine.destroy()


def request(seed=1, ids=(2, 3), max_new_tokens=4, **options):
    gconfig = GenerationHyperparameters(
        max_new_tokens=max_new_tokens, ignore_eos=True, seed=seed, n_samples=8, **options
    )
    return ModelRequest(input_ids=list(ids), gconfig=gconfig)


def outputs(responses):
    return [(r.output_tokens, r.output_logprobs, r.stop_reason) for r in responses]


async def test_remote_and_local_give_the_same_bits(engine, local):
    requests = [request(seed, ids=(2, 3 + seed % 3), max_new_tokens=6) for seed in range(40)]
    remote = await asyncio.gather(*map(engine.agenerate, requests))
    near = await asyncio.gather(*map(local.agenerate, requests))
    assert outputs(remote) == outputs(near)
    for response, sent in zip(remote, requests, strict=True):
        assert response.input_tokens == sent.input_ids
        assert response.output_len == 6
        assert 0 < response.ttft <= response.latency < 20


async def test_copies_of_a_request_run_side_by_side(engine, local):
    one = request()
    for each in (engine, local):
        replies = await asyncio.gather(*[each.agenerate(one.copy()) for _ in range(3)])
        assert len({tuple(reply.output_tokens) for reply in replies}) == 1


async def test_a_bad_request_spoils_no_other(engine, local):
    for each in (engine, local):
        good, bad = await asyncio.gather(
            each.agenerate(request()), each.agenerate(request(ids=[9999])), return_exceptions=True
        )
        assert good.output_len == 4
        assert isinstance(bad, ValueError) and "input_ids" in str(bad)
        with pytest.raises(ValueError, match="input_ids"):
            await each.agenerate(request(ids=[]))


async def test_pause_from_another_thread_holds_generation(engine):
    await asyncio.to_thread(engine.pause_generation)
    task = asyncio.create_task(engine.agenerate(request()))
    done, _ = await asyncio.wait([task], timeout=0.1)
    assert not done
    await asyncio.to_thread(engine.continue_generation)
    assert (await task).output_len == 4


async def test_cancelled_calls_leave_the_server(engine):
    await asyncio.to_thread(engine.pause_generation)
    tasks = [asyncio.create_task(engine.agenerate(request(max_new_tokens=400))) for _ in range(3)]
    await wait_for_stat(engine, "waiting", 3)
    for task in tasks:
        task.cancel()
    await wait_for_stat(engine, "waiting", 0)


async def wait_for_stat(engine, name, value):
    deadline = time.monotonic() + 300
    while (await asyncio.to_thread(engine.stats))[name] != value:
        assert time.monotonic() < deadline, f"{name} never became {value}"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["shm", "disk"])
async def test_weights_reach_the_server(engine, tmp_path, kind):
    before = await engine.agenerate(request())
    with PublicationRoot(kind, run_name="test", disk_root=tmp_path / "weights") as root:
        for version, seed in ((11, 3), (12, 0)):
            meta = root.meta().with_version(version)
            weights = tiny_model(seed=seed).named_hf_tensors()
            await asyncio.to_thread(send_weights, engine, meta, weights)
            assert await asyncio.to_thread(engine.get_version) == version
            after = await engine.agenerate(request())
            assert after.output_versions == [version] * 4
            assert (outputs([after]) == outputs([before])) == (seed == 0)


async def test_a_damaged_publication_is_refused_and_the_old_weights_serve(engine, tmp_path):
    version = engine.get_version()
    before = await engine.agenerate(request())
    meta = WeightUpdateMeta.from_disk(tmp_path / "absent").with_version(99)
    with pytest.raises(RuntimeError, match="no such publication"):
        engine.update_weights(meta)
    with pytest.raises(ValueError, match="weight_update_mode"):
        engine.update_weights(WeightUpdateMeta(type="direct", version=99), iter(()))
    assert engine.get_version() == version
    assert outputs([await engine.agenerate(request())]) == outputs([before])


async def test_direct_weights_in_one_process(local):
    meta = WeightUpdateMeta(type="direct")
    send_weights(local, meta.with_version(5), tiny_model(seed=4).named_hf_tensors())
    assert local.get_version() == 5
    assert (await local.agenerate(request())).output_versions == [5] * 4
    send_weights(local, meta.with_version(0), tiny_model(seed=0).named_hf_tensors())


async def test_busy_intervals_name_the_server(engine, address):
    before = time.time()
    await engine.agenerate(request())
    intervals = (await asyncio.to_thread(engine.busy_intervals, before))[address]
    assert intervals and all(before <= start < end for start, end in intervals)


def test_wrong_token_fails_at_once(address):
    engine = NativeRemoteEngine([address], "wrong", setup_timeout_s=900)
    with pytest.raises(RuntimeError, match="401.*Authorization"):
        engine.initialize()


def test_servers_that_never_come_up():
    engine = NativeRemoteEngine(["127.0.0.1:1", "127.0.0.1:2"], TOKEN, setup_timeout_s=0.1)
    with pytest.raises(RuntimeError, match="127.0.0.1:[12]"):
        engine.initialize()
    engine.destroy()
    with pytest.raises(ValueError, match="addrs"):
        NativeRemoteEngine([], TOKEN)


def test_launch_shows_why_a_server_did_not_start(tmp_path):
    with pytest.raises(RuntimeError, match=r"native server .*exit code 2(.|\n)*config.json"):
        launch_native_server(tmp_path, token=TOKEN, setup_timeout_s=900)


def test_destroy_from_another_thread_cancels_who_waits(address):
    engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=300)
    engine.pause_generation()
    outcome, started = [], threading.Event()

    async def wait_for_it():
        asyncio.get_running_loop().call_later(0.05, started.set)
        try:
            await engine.agenerate(request())
        except asyncio.CancelledError:
            outcome.append("cancelled")

    thread = threading.Thread(target=lambda: asyncio.run(wait_for_it()))
    thread.start()
    assert started.wait(900)
    engine.destroy()
    thread.join(900)
    engine.continue_generation()
    assert outcome == ["cancelled"]


def line_of(entry):
    return {
        "rid": entry["rid"],
        "output_tokens": [entry["gconfig"]["seed"]],
        "output_logprobs": [-0.5],
        "output_versions": [0],
        "stop_reason": "stop",
        "latency": 0.2,
        "ttft": 0.1,
    }


def all_replies(entries):
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(
        json.dumps(line_of(entry)).encode() + b"\n" for entry in entries
    )


def first_reply_and_a_half(entries):
    full = all_replies(entries)
    return full[: full.index(b"\n", full.index(b"\r\n\r\n") + 4) + 20]


async def gather_from(address, count, **options):
    options = {"request_timeout_s": 5, "request_retries": 2, **options}
    engine = NativeRemoteEngine([address], TOKEN, **options)
    calls = [engine.agenerate(request(seed)) for seed in range(count)]
    try:
        return await asyncio.gather(*calls, return_exceptions=True)
    finally:
        await asyncio.to_thread(engine.destroy)


async def test_calls_of_one_tick_are_one_exchange():
    async with scripted_server(all_replies) as (address, seen):
        replies = await gather_from(address, 512)
    assert [reply.output_tokens for reply in replies] == [[seed] for seed in range(512)]
    assert len(seen) == 1
    assert all(reply.ttft == 0.1 and reply.latency > 0 for reply in replies)


async def test_only_lost_requests_are_sent_again():
    async with scripted_server(first_reply_and_a_half, hang_up, all_replies) as (address, seen):
        replies = await gather_from(address, 4)
    assert [reply.output_tokens for reply in replies] == [[0], [1], [2], [3]]
    assert [len(entries) for entries in seen] == [4, 3, 3]
    assert [entry["gconfig"]["seed"] for entry in seen[2]] == [1, 2, 3]
    rids = [entry["rid"] for entries in seen for entry in entries]
    assert len(set(rids)) == len(rids)


async def test_retries_have_an_end():
    async with scripted_server(hang_up) as (address, seen):
        replies = await gather_from(address, 2, request_retries=1)
    assert len(seen) == 2
    for error in replies:
        assert isinstance(error, ServerError) and "after 2 attempts" in str(error)


async def test_no_reply_in_time():
    async with scripted_server(lambda entries: b"HTTP/1.1 200 OK\r\n") as (address, _):
        (error,) = await gather_from(address, 1, request_timeout_s=0.1, request_retries=0)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'HTTP/1.1 503 No\r\n\r\n{"error": "the engine ended: boom"}', "503: the engine ended"),
        (b"HTTP/1.1 502 No\r\n\r\n<html>proxy</html>", "502: <html>proxy"),
    ],
)
async def test_an_answer_that_is_an_error_is_raised_at_once(answer, message):
    async with scripted_server(lambda entries: answer) as (address, seen):
        replies = await gather_from(address, 2)
    assert len(seen) == 1
    for error in replies:
        assert isinstance(error, ServerError) and message in str(error)


OTHERS = b'{"rid": "x", "refused": "engine", "message": "m"}\n'


@pytest.mark.parametrize(
    ("line", "message"), [(b"nonsense\n", "not JSON"), (OTHERS, "'x', which nobody sent")]
)
async def test_lines_that_are_no_reply_are_asked_for_again(line, message):
    def script(entries):
        return b"HTTP/1.1 200 OK\r\n\r\n" + line

    async with scripted_server(script, script, all_replies) as (address, _):
        assert [reply.output_tokens for reply in await gather_from(address, 2)] == [[0], [1]]
    async with scripted_server(script) as (address, seen):
        replies = await gather_from(address, 2)
    assert len(seen) == 3
    for error in replies:
        fault = f"native server {address}: malformed reply: "
        assert isinstance(error, ServerError) and str(error).startswith(fault)
        assert message in str(error) and "after 3 attempts" in str(error)


def changed_reply(**changes):
    """Honest replies, but for the one with seed 1."""

    def script(entries):
        lines = [
            {**line_of(entry), **(changes if entry["gconfig"]["seed"] == 1 else {})}
            for entry in entries
        ]
        return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(json.dumps(x).encode() + b"\n" for x in lines)

    return script


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": [64]}, "must lie in 0 .. 63"),
        ({"output_tokens": [True]}, r"output_tokens\[0\]: expected a token id"),
        ({"output_logprobs": [-9999.0]}, "a log-probability, -1000 to 0 "),
        ({"output_logprobs": [0.5]}, r"output_logprobs\[0\]: expected a log-probability"),
        ({"output_logprobs": [True]}, r"output_logprobs\[0\]: expected a log-probability"),
        ({"output_logprobs": [None]}, r"output_logprobs\[0\]: expected a log-probability"),
        ({"output_versions": [-1]}, "versions 0 .. 4 exist, got -1"),
        ({"output_versions": [5]}, "versions 0 .. 4 exist, got 5"),
        ({"output_versions": [True]}, r"output_versions\[0\]: expected an integer"),
        (
            {name: [1] * 5 for name in ("output_tokens", "output_versions")}
            | {"output_logprobs": [-1.0] * 5},
            "got 5 tokens, 4 were requested",
        ),
        (
            {"output_tokens": [1, 1], "output_logprobs": [-1, -1], "output_versions": [3, 2]},
            "must not decrease",
        ),
        (
            {"output_tokens": [], "output_logprobs": [], "output_versions": []},
            "got none, though the request ended with 'stop'",
        ),
    ],
)
async def test_one_bad_reply_spoils_no_other(changes, message):
    broken = changed_reply(**changes)
    async with scripted_server(*[health_of(4)] * 2, broken, broken, all_replies) as (address, seen):
        engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=5, vocab_size=64)
        await asyncio.to_thread(engine.initialize)
        replies = await asyncio.gather(*[engine.agenerate(request(seed)) for seed in range(3)])
        assert [reply.output_tokens for reply in replies] == [[0], [1], [2]]
        assert engine.take_counts()["replies_refused"] == 2
        await asyncio.to_thread(engine.destroy)
    assert [len(entries) for entries in seen if entries] == [3, 1, 1]
    async with scripted_server(*[health_of(4)] * 2, broken) as (address, seen):
        engine = NativeRemoteEngine([address], TOKEN, request_retries=1, vocab_size=64)
        await asyncio.to_thread(engine.initialize)
        with pytest.raises(ServerError, match=rf"{address}: malformed reply: .*{message}"):
            await engine.agenerate(request(1))
        await asyncio.to_thread(engine.destroy)


def health_of(version):
    health = json.dumps({"version": version}).encode()
    return lambda entries: b"HTTP/1.1 200 OK\r\n\r\n" + health


@pytest.mark.parametrize("version", [-1, True, "3", None, 1.5])
async def test_a_server_with_a_version_that_is_none_is_named(version):
    async with scripted_server(health_of(version)) as (address, _):
        engine = NativeRemoteEngine([address], TOKEN, setup_timeout_s=5)
        with pytest.raises(RuntimeError, match=f"native server {address}: no version is"):
            await asyncio.to_thread(engine.initialize)


async def test_samples_of_a_prompt_go_to_one_server_and_prompts_are_shared_out():
    async with (
        scripted_server(all_replies) as (first, seen_first),
        scripted_server(all_replies) as (second, seen_second),
    ):
        engine = NativeRemoteEngine([first, second], TOKEN, request_timeout_s=5)
        requests = [request(seed, ids=[prompt]) for seed in range(8) for prompt in range(6)]
        await asyncio.gather(*map(engine.agenerate, requests))
        await asyncio.to_thread(engine.destroy)
    prompts = [{entry["input_ids"][0] for entry in seen[0]} for seen in (seen_first, seen_second)]
    assert [len(each) for each in prompts] == [3, 3]
    assert not prompts[0] & prompts[1]


async def test_a_dead_server_is_avoided():
    async with scripted_server(hang_up) as (dead, _), scripted_server(all_replies) as (alive, _):
        engine = NativeRemoteEngine([dead, alive], TOKEN, request_timeout_s=5, request_retries=1)
        replies = await asyncio.gather(*[engine.agenerate(request(s, ids=[s])) for s in range(6)])
        await asyncio.to_thread(engine.destroy)
    assert [reply.output_tokens for reply in replies] == [[seed] for seed in range(6)]


def ended(entries):
    return b'HTTP/1.1 503 No\r\n\r\n{"error": "the engine ended: boom"}'


async def test_a_server_whose_engine_has_ended_is_left_out(engine, address):
    async with scripted_server(ended) as (broken, seen):
        both = NativeRemoteEngine([broken, address], TOKEN, request_timeout_s=300)
        replies = await asyncio.gather(*[both.agenerate(request(s, ids=[2, s])) for s in range(6)])
        assert [reply.output_len for reply in replies] == [4] * 6 and seen
        await asyncio.to_thread(both.continue_generation)
        assert both.servers == [address]
        with pytest.raises(ServerError, match="503: the engine ended: boom"):
            await asyncio.to_thread(NativeRemoteEngine([broken], TOKEN).pause_generation)
        await asyncio.to_thread(both.destroy)


async def test_a_server_of_another_model_does_not_join(engine, address):
    def health(entries):
        return b'HTTP/1.1 200 OK\r\n\r\n{"status": "ok", "version": 0, "model": "/other"}'

    async with scripted_server(health) as (other, _):
        with pytest.raises(RuntimeError, match=f"{other} serves the model /other, the others"):
            await asyncio.to_thread(engine.join, other)
    assert engine.servers == [address]


def told_then_cut(entries):
    """Two pieces of progress, then the connection is gone."""
    lines = [
        {"rid": entry["rid"], "progress": piece}
        for piece in (PIECE, {name: values[:1] for name, values in PIECE.items()})
        for entry in entries
    ]
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(json.dumps(x).encode() + b"\n" for x in lines)


PIECE = {"output_tokens": [4, 5], "output_logprobs": [-1.0, -2.0], "output_versions": [1, 1]}
PIECES = {name: [*values, values[0]] for name, values in PIECE.items()}  # of one server


def told_and_ended(entries):
    lines = [
        {
            **line_of(entry),
            **{name: [*entry["so_far"][name], line_of(entry)[name][0]] for name in PIECE},
        }
        for entry in entries
    ]
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(json.dumps(x).encode() + b"\n" for x in lines)


async def ask_two(address):
    engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=60)
    calls = [engine.agenerate(request(seed, max_new_tokens=9)) for seed in range(2)]
    replies = await asyncio.gather(*calls)
    counts = engine.take_counts()
    await asyncio.to_thread(engine.destroy)
    return replies, counts


async def test_requests_are_sent_again_with_what_servers_told():
    async with scripted_server(told_then_cut, told_then_cut, told_and_ended) as (address, seen):
        replies, _ = await ask_two(address)
    twice = {name: values * 2 for name, values in PIECES.items()}
    # The last server is older than those before: it may be, they are not one.
    assert [reply.output_versions for reply in replies] == [[1] * 6 + [0]] * 2
    assert [reply.output_tokens[6:] for reply in replies] == [[0], [1]]
    expected = [[None, None], [PIECES, PIECES], [twice, twice]]
    assert [[entry.get("so_far") for entry in entries] for entries in seen] == expected


async def test_a_reply_begins_with_what_was_told():
    """One that does not is refused, and what that server told is forgotten."""
    async with scripted_server(told_then_cut, all_replies, all_replies) as (address, seen):
        replies, counts = await ask_two(address)
    assert [reply.output_tokens for reply in replies] == [[0], [1]]
    assert counts["replies_refused"] == 2
    first, second, *rest = [[entry.get("so_far") for entry in entries] for entries in seen]
    assert (first, second) == ([None, None], [PIECES, PIECES])
    assert sum(rest, []) == [None, None]  # together, or each when its reply was refused


async def test_one_engine_serves_one_event_loop_at_a_time(engine):
    await engine.agenerate(request())
    with pytest.raises(RuntimeError, match="two event loops"):
        await asyncio.to_thread(asyncio.run, engine.agenerate(request()))


async def test_tokens_are_told_as_they_are_sampled(engine, local):
    for each in (engine, local):
        asked = request(max_new_tokens=40)
        told = Told(asked)
        reply = await each.agenerate(asked)
        told.check(reply)
        assert reply.output_len == 40 and told.num_calls > 5
        assert outputs([reply]) == outputs([await each.agenerate(request(max_new_tokens=40))])


async def test_a_cancelled_stream_frees_its_generation(engine, local):
    for each in (engine, local):
        asked = request(max_new_tokens=400)
        told = Told(asked)
        task = asyncio.create_task(each.agenerate(asked))
        await told.begun.wait()
        task.cancel()
        await wait_for_stat(each, "running", 0)


async def test_one_of_many_that_were_sent_together_is_freed(engine):
    await asyncio.to_thread(engine.pause_generation)
    tasks = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(3)]
    await wait_for_stat(engine, "waiting", 3)
    tasks[1].cancel()
    await wait_for_stat(engine, "waiting", 2)
    await asyncio.to_thread(engine.continue_generation)
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(reply, "output_len", None) for reply in replies] == [4, None, 4]


async def test_many_given_up_together_close_their_connection_and_send_no_aborts():
    paths, left = [], asyncio.Event()

    async def hold(reader, writer):
        paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        while await reader.read(65536):
            pass
        left.set()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with server:
        engine = NativeRemoteEngine(["{}:{}".format(*server.sockets[0].getsockname())], TOKEN)
        tasks = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(50)]
        async with asyncio.timeout(300):
            while not paths:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await left.wait()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(engine.destroy)
    assert paths == [b"/generate"]


async def test_what_was_told_is_told_once():
    """Through servers that are lost, and one whose reply does not begin with it."""
    scripts = (told_then_cut, told_then_cut, all_replies, told_and_ended)
    async with scripted_server(*scripts) as (address, seen):
        engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=5)
        asked = request(3, max_new_tokens=9)
        told = Told(asked)
        reply = await engine.agenerate(asked)
        await asyncio.to_thread(engine.destroy)
    assert told.tokens == reply.output_tokens == [4, 5, 4] * 2 + [3]
    assert told.logprobs == reply.output_logprobs
    assert [entry["progress_tokens"] for entries in seen for entry in entries] == [1] * 4
