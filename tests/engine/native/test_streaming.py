"""Progress of requests that stream, and stop strings, inside the engine and its loop."""

from __future__ import annotations

import queue
from dataclasses import replace

import pytest
from tiny import tiny_model, write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer, write_byte_tokenizer

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.sequence import Finished, GenRequest, Progress, StopWatch
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
    return GenRequest(rid, [5, 6], gconfig, progress_tokens=int(stream), stop_watch=watch)


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


def test_progress_comes_every_so_many_tokens(engine):
    steps = run(engine, replace(request("a", max_new_tokens=20), progress_tokens=8))
    parts = [one for step in steps for one in step if isinstance(one, Progress)]
    (ended,) = [one for step in steps for one in step if isinstance(one, Finished)]
    assert [len(part.tokens) for part in parts] == [8, 8]
    assert parts[1].tokens == ended.output_tokens[8:16]
    assert parts[1].logprobs == ended.output_logprobs[8:16]
    assert parts[1].versions == ended.output_versions[8:16] == [0] * 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frequency_penalty": 0.7},
        {"min_new_tokens": 9, "stop_token_ids": list(range(0, VOCAB_SIZE, 6))},
    ],
)
def test_a_request_goes_on_from_tokens_another_engine_has_drawn(engine, options):
    whole = request("a", max_new_tokens=24)
    whole.gconfig = whole.gconfig.new(ignore_eos=True, **options)
    ((expected,),) = [
        kept
        for step in run(engine, replace(whole, progress_tokens=0))
        if (kept := [one for one in step if isinstance(one, Finished)])
    ]
    for count in (1, 5):
        so_far = Progress(
            "b",
            expected.output_tokens[:count],
            [-9.0] * count,  # whatever the other said of them stays
            [7] * count,
        )
        steps = run(engine, replace(whole, rid="b", so_far=so_far, progress_tokens=4))
        results = [one for step in steps for one in step]
        last = results[-1]
        assert last.output_tokens == expected.output_tokens
        assert last.output_logprobs[:count] == [-9.0] * count
        assert last.output_logprobs[count:] == pytest.approx(expected.output_logprobs[count:])
        assert last.output_versions == [7] * count + [0] * (len(last.output_tokens) - count)
        assert last.stop_reason == expected.stop_reason and last.first_token_time > 0
        assert results[0].tokens == expected.output_tokens[count : count + 4]


@pytest.mark.gpu
def test_a_request_goes_on_where_steps_are_graphs():
    """Several tokens a launch, launches ahead of the host."""
    model = tiny_model(vocab_size=VOCAB_SIZE, head_dim=16).cuda()
    engine = NativeEngine(model, num_pages=200)
    whole = request("a", max_new_tokens=100)
    whole.gconfig = whole.gconfig.new(ignore_eos=True)
    results = [one for step in run(engine, replace(whole, progress_tokens=16)) for one in step]
    *parts, expected = results
    assert all(len(part.tokens) >= 16 for part in parts) and len(parts) > 3
    tokens = sum((part.tokens for part in parts[:2]), [])
    logprobs = sum((part.logprobs for part in parts[:2]), [])
    so_far = Progress("b", tokens, logprobs, [7] * len(tokens))
    (last,) = [
        one
        for step in run(engine, replace(whole, rid="b", so_far=so_far))
        for one in step
        if isinstance(one, Finished)
    ]
    assert last.output_tokens == expected.output_tokens
    assert last.output_logprobs == pytest.approx(expected.output_logprobs, abs=1e-3)
    assert last.output_versions == [7] * len(tokens) + [0] * (100 - len(tokens))


def test_a_stop_string_may_begin_in_what_another_engine_has_drawn(engine):
    (free,) = [one for step in run(engine, request("a", stream=False)) for one in step]
    text = TOKENIZER.decode(free.output_tokens[3:6], skip_special_tokens=False)
    so_far = Progress("b", free.output_tokens[:4], free.output_logprobs[:4], [0] * 4)
    steps = run(engine, replace(request("b", stream=False, stop=[text]), so_far=so_far))
    (stopped,) = [one for step in steps for one in step]
    assert stopped.output_tokens == free.output_tokens[:6] and stopped.stop_reason == "stop"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([5] * 12, "so_far has 12 tokens"), ([VOCAB_SIZE], "so_far must lie in")],
)
def test_what_cannot_go_on_is_refused(engine, tokens, message):
    count = len(tokens)
    so_far = Progress("a", tokens, [-1.0] * count, [0] * count)
    with pytest.raises(ValueError, match=message):
        engine.add(replace(request("a"), so_far=so_far))
    assert not engine.has_work


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
        for one in handed.get(timeout=900):
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
        (part,) = handed.get(timeout=900)
        assert isinstance(part, Progress)
        tokens += part.tokens
    assert loop.abort(["a"]).result(timeout=900) == 1
    while not isinstance(last := handed.get(timeout=900)[0], Reply):
        tokens += last.tokens
    assert last.finished.stop_reason == "abort"
    assert last.finished.output_tokens[: len(tokens)] == tokens
    loop.close()
