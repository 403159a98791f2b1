"""EngineLoop around a real tiny engine: delivery, pause, orders between steps, abort, the end."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.loop import EngineEndedError, EngineLoop
from areal.engine.native.sequence import GenRequest
from areal.engine.native.wire import Refusal, Reply

LONG = 250  # output tokens: runs until something ends it


@pytest.fixture
def engine():
    return NativeEngine(tiny_model(), num_pages=200, max_running=8)


@pytest.fixture
def loop(engine):
    loop = EngineLoop(engine)
    yield loop
    loop.close()


def request(rid, *, max_new_tokens=4, ids=(2, 3), **options):
    gconfig = GenerationHyperparameters(
        max_new_tokens=max_new_tokens, ignore_eos=True, seed=1, **options
    )
    return GenRequest(rid, list(ids), gconfig)


class Inbox:
    """Collects what is delivered, as a receiver does."""

    def __init__(self):
        self.deliveries = queue.SimpleQueue()

    def __call__(self, results):
        self.deliveries.put((results, threading.current_thread().name))

    def take(self):
        return self.deliveries.get(timeout=900)[0]

    def take_all(self, count):
        results = []
        while len(results) < count:
            results += self.take()
        return {result.rid: result for result in results}


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def num_generated(loop):
    return loop.call(lambda engine: engine.stats()["tokens_generated"]).result(300)


def test_each_request_gets_its_reply(loop):
    inbox = Inbox()
    loop.submit([request("a"), request("b", max_new_tokens=7)], inbox)
    results = inbox.take_all(2)
    assert [len(results[rid].finished.output_tokens) for rid in "ab"] == [4, 7]
    for reply in results.values():
        assert 0 < reply.ttft <= reply.latency < 10


def test_requests_that_end_together_are_delivered_together(loop):
    inbox = Inbox()
    loop.submit([request(str(n)) for n in range(8)], inbox)
    assert len(inbox.take()) == 8


def test_a_bad_request_is_refused_alone(loop):
    inbox = Inbox()
    loop.submit([request("good"), request("bad", ids=[9999]), request("good")], inbox)
    refused = {(r.rid, r.kind): r.message for r in inbox.take()}
    assert refused.keys() == {("bad", "request"), ("good", "request")}
    assert "input_ids" in refused["bad", "request"]
    assert "already running" in refused["good", "request"]
    assert isinstance(inbox.take_all(1)["good"], Reply)


def test_pause_holds_and_resume_goes_on_where_it_was(loop):
    inbox = Inbox()
    loop.submit([request("a", max_new_tokens=LONG)], inbox)
    wait_until(lambda: num_generated(loop) > 5)
    loop.pause()
    held = num_generated(loop)
    loop.submit([request("b")], inbox)  # may come while paused
    time.sleep(0.05)
    assert num_generated(loop) == held < LONG
    loop.resume()
    results = inbox.take_all(2)
    assert len(results["a"].finished.output_tokens) == LONG


def test_paused_or_not_the_tokens_are_the_same(loop):
    inbox = Inbox()
    loop.submit([request("a", max_new_tokens=40)], inbox)
    expected = inbox.take_all(1)["a"].finished
    loop.submit([request("b", max_new_tokens=40)], inbox)
    for _ in range(5):
        loop.pause()
        loop.resume()
    found = inbox.take_all(1)["b"].finished
    assert found.output_tokens == expected.output_tokens
    assert found.output_logprobs == expected.output_logprobs


def test_weights_change_between_two_steps(loop):
    other = dict(tiny_model(seed=9).named_hf_tensors())
    inbox = Inbox()
    loop.submit([request("a", max_new_tokens=LONG)], inbox)
    wait_until(lambda: num_generated(loop) > 5)
    loop.call(lambda engine: engine.load_weights(other.items(), 4, recompute_kv=False)).result(300)
    assert loop.version == 4
    versions = inbox.take_all(1)["a"].finished.output_versions
    assert set(versions) == {0, 4} and versions == sorted(versions)


def test_abort_gives_what_it_has(loop):
    inbox = Inbox()
    loop.submit([request("a", max_new_tokens=LONG), request("b", max_new_tokens=LONG)], inbox)
    wait_until(lambda: num_generated(loop) > 5)
    assert loop.abort(["a", "unknown"]).result(300) == 1
    a = inbox.take_all(1)["a"].finished
    assert a.stop_reason == "abort" and 0 < len(a.output_tokens) < LONG
    assert loop.abort().result(300) == 1
    assert inbox.take_all(1)["b"].finished.stop_reason == "abort"


def test_discarded_requests_free_their_pages_in_silence(loop):
    inbox = Inbox()
    loop.submit([request("a", max_new_tokens=LONG)], inbox)
    wait_until(lambda: num_generated(loop) > 5)
    loop.discard(["a"])
    assert loop.call(lambda engine: engine.stats()["running"]).result(300) == 0
    assert inbox.deliveries.empty()


def test_an_error_in_a_call_is_the_callers(loop):
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 / 0).result(300)
    inbox = Inbox()
    loop.submit([request("a")], inbox)
    assert isinstance(inbox.take_all(1)["a"], Reply)


def test_broken_weights_are_a_fault_not_data(loop):
    broken = {name: tensor * float("nan") for name, tensor in tiny_model().named_hf_tensors()}
    loop.call(lambda engine: engine.load_weights(broken.items(), 1, recompute_kv=True)).result(300)
    inbox = Inbox()
    loop.submit([request("a")], inbox)
    refusal = inbox.take_all(1)["a"]
    assert isinstance(refusal, Refusal) and refusal.kind == "engine"


def test_a_receiver_that_raises_hurts_nobody_else(loop):
    def broken(results):
        raise OSError("the client is gone")

    inbox = Inbox()
    loop.submit([request("a")], broken)
    loop.submit([request("b")], inbox)
    assert isinstance(inbox.take_all(1)["b"], Reply)


def test_a_step_that_raises_ends_the_loop_and_tells_everybody(engine, loop):
    def out_of_memory(*args):
        raise MemoryError("no memory left")

    loop.pause()
    inbox = Inbox()
    loop.submit([request("a"), request("b")], inbox)
    engine.model.norm.register_forward_pre_hook(out_of_memory)
    loop.resume()
    results = inbox.take_all(2)
    assert all(isinstance(r, Refusal) and r.kind == "engine" for r in results.values())
    assert "MemoryError: no memory left" in results["a"].message
    assert isinstance(loop.failure, MemoryError)
    with pytest.raises(EngineEndedError, match="no memory left"):
        loop.submit([request("c")], inbox)
    with pytest.raises(EngineEndedError, match="no memory left"):
        loop.pause()
    loop.discard(["a"])


def test_close_refuses_who_still_waits(engine):
    loop = EngineLoop(engine)
    inbox = Inbox()
    loop.submit([request("a", max_new_tokens=LONG)], inbox)
    loop.close()
    loop.close()
    assert "closed" in inbox.take_all(1)["a"].message
    assert loop.failure is None
    with pytest.raises(EngineEndedError, match="closed"):
        loop.call(lambda engine: None)


def test_busy_intervals_cover_the_work_and_only_it(loop):
    before = time.time()
    inbox = Inbox()
    loop.submit([request("a", max_new_tokens=50)], inbox)
    inbox.take_all(1)
    loop.pause()  # the last step is recorded
    after = time.time()
    intervals = loop.busy.since(0)
    assert all(before <= start <= end <= after for start, end in intervals)
    assert sum(end - start for start, end in intervals) > 0.2 * (after - before)
    time.sleep(0.01)
    assert loop.busy.since(after) == []


def test_idle_time_by_cause(loop):
    """Every cause grows while it holds, and only then."""

    def grows(cause: str) -> None:
        before = loop.stats()
        deadline = time.monotonic() + 900
        while loop.stats()[cause] <= before[cause]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        after = loop.stats()
        others = {"no_request_s", "paused_s", "offloaded_s"} - {cause}
        assert all(after[other] == before[other] for other in others)

    loop.call(lambda engine: None).result()
    grows("no_request_s")
    loop.pause()
    grows("paused_s")
    loop.resume()
    loop.call(lambda engine: engine.offload()).result()
    grows("offloaded_s")
    loop.call(lambda engine: engine.onload()).result()
    assert loop.stats()["control_s"] > 0


async def test_idle_time_is_no_progress(tmp_path):
    """Else a run that hangs would never be ended."""
    engine = NativeLocalEngine(write_tiny_model(tmp_path / "model"), num_pages=50)
    engine.initialize()
    try:
        before, progress = engine.stats(), engine.progress()
        deadline = time.monotonic() + 900
        while engine.stats() == before:
            assert time.monotonic() < deadline
        assert engine.progress() == progress
        await engine.agenerate(
            ModelRequest(rid="a", input_ids=[5, 9], gconfig=request("a").gconfig)
        )
        assert engine.progress() != progress
    finally:
        engine.destroy()
