"""Progress of requests that stream, and stop strings, inside the engine and its loop."""

from __future__ import annotations

import queue

import pytest
from tiny import tiny_model, write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer, write_byte_tokenizer

from areal.api.config.generation import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.stop_strings import StopWatch
from areal.engine.native.wire import Reply

TOKENIZER = byte_tokenizer()


@pytest.fixture
def engine():
    return NativeEngine(tiny_model(vocab_size=VOCAB_SIZE), num_pages=200)


def request(rid, *, stream=True, stop=None, seed=1, max_new_tokens=12, min_new_tokens=0):
    gconfig = GenerationHyperparameters(
        max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, seed=seed, stop=stop
    )
    watch = StopWatch(TOKENIZER, stop, min_tokens=min_new_tokens) if stop else None
    return GenRequest(rid, [5, 6], gconfig, stream=stream, stop_watch=watch)


def run(engine, *requests):
    for one in requests:
        engine.add(one)
    results = []
    while engine.has_work:
        results.append(engine.step())
    return results


def test_tokens_come_as_they_are_drawn_and_the_last_with_the_end(engine):
    steps = run(engine, request("a"), request("b", stream=False))
    parts = [one for step in steps for one in step if isinstance(one, Progress)]
    ended = {one.rid: one for step in steps for one in step if isinstance(one, Finished)}
    assert ended["a"].output_tokens == ended["b"].output_tokens
    assert {part.rid for part in parts} == {"a"}
    tokens = sum((part.tokens for part in parts), [])
    logprobs = sum((part.logprobs for part in parts), [])
    assert len(parts) > 5 and 0 < len(tokens) < 12
    assert tokens == ended["a"].output_tokens[: len(tokens)]
    assert logprobs == ended["a"].output_logprobs[: len(tokens)]


def test_a_stop_string_ends_the_output_with_its_last_token(engine):
    ((free,),) = [step for step in run(engine, request("a", stream=False)) if step]
    text = TOKENIZER.decode(free.output_tokens[3:6], skip_special_tokens=False)
    stopped = [
        one
        for step in run(engine, request("b", stop=[text, "never"]))
        for one in step
        if isinstance(one, Finished)
    ]
    assert stopped[0].stop_reason == "stop"
    assert stopped[0].output_tokens == free.output_tokens[:6]
    assert stopped[0].output_logprobs == free.output_logprobs[:6]
    assert engine.stats()["running"] == 0


def test_stop_strings_without_a_watch_are_refused(engine):
    gconfig = GenerationHyperparameters(stop=["x"])
    with pytest.raises(ValueError, match="gconfig.stop.*stop_watch"):
        engine.add(GenRequest("a", [5], gconfig))


async def test_the_engine_in_this_process_takes_them_from_its_folder(tmp_path):
    write_tiny_model(tmp_path, vocab_size=VOCAB_SIZE)
    engine = NativeLocalEngine(tmp_path, num_pages=50)
    engine.initialize()
    gconfig = GenerationHyperparameters(max_new_tokens=12, seed=1, ignore_eos=True)
    free = await engine.agenerate(ModelRequest([5, 6], gconfig))
    text = TOKENIZER.decode(free.output_tokens[3:6], skip_special_tokens=False)
    stopping = ModelRequest([5, 6], gconfig.new(stop=[text]))
    with pytest.raises(ValueError, match="has no tokenizer"):
        await engine.agenerate(stopping)
    write_byte_tokenizer(tmp_path)
    stopped = await engine.agenerate(stopping)
    assert stopped.stop_reason == "stop"
    assert stopped.output_tokens == free.output_tokens[:6]
    engine.destroy()


def test_one_hand_over_per_step_and_receiver(engine):
    loop = EngineLoop(engine)
    handed: queue.Queue = queue.Queue()
    loop.pause()
    requests = [request(str(n), seed=n, max_new_tokens=6) for n in range(5)]
    loop.submit(requests, handed.put)
    steps_before = loop.stats()["steps"]
    loop.resume()
    tokens = {one.rid: [] for one in requests}
    replies, num_handed = {}, 0
    while len(replies) < 5:
        num_handed += 1
        for one in handed.get(timeout=10):
            if isinstance(one, Reply):
                replies[one.rid] = one.finished
            else:
                tokens[one.rid] += one.tokens
    assert num_handed <= loop.stats()["steps"] - steps_before
    loop.close()
    for rid, finished in replies.items():
        assert tokens[rid] == finished.output_tokens[: len(tokens[rid])]
    assert sum(map(len, tokens.values())) >= 15


def test_an_aborted_stream_has_all_its_tokens(engine):
    loop = EngineLoop(engine)
    handed: queue.Queue = queue.Queue()
    loop.submit([request("a", max_new_tokens=400)], handed.put)
    tokens = []
    while len(tokens) < 3:
        (part,) = handed.get(timeout=10)
        assert isinstance(part, Progress)
        tokens += part.tokens
    assert loop.abort(["a"]).result(timeout=10) == 1
    while not isinstance(last := handed.get(timeout=10)[0], Reply):
        tokens += last.tokens
    assert last.finished.stop_reason == "abort"
    assert last.finished.output_tokens[: len(tokens)] == tokens
    loop.close()
