"""Drafts: what is guessed, when that is tried, and that it changes no draw."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.drafts import Drafts, num_equal
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest, Sequence
from areal.engine.native.torch_runner import TorchRunner

VOCAB = 64


def sequence_of(prompt, output=(), **options) -> Sequence:
    gconfig = GenerationHyperparameters(**options)
    sequence = Sequence("a", tuple(prompt), gconfig, 0, frozenset(), max_output=1000)
    sequence.output_tokens = list(output)
    return sequence


def joined(drafts: Drafts, prompt, output=(), **options) -> Sequence:
    sequence = sequence_of(prompt, output, **options)
    drafts.join(sequence)
    return sequence


FILLER = list(range(1000, 1040))  # an output this long is worth a draft


def test_a_draft_continues_the_place_that_agrees_longest():
    drafts = Drafts()
    joined(drafts, [1], [*FILLER, 7, 8, 9, 50, 51, 52, 53, 54])
    joined(drafts, [1], [*FILLER, 6, 7, 8, 9, 60, 61, 62, 63, 64])
    joined(drafts, [2], [*FILLER, 5, 6, 7, 8, 9, 70, 71])  # another prompt
    asks = joined(drafts, [1], [*range(2000, 2040), 6, 7, 8, 9])
    assert drafts.draft(asks, 10) == [60, 61, 62, 63]  # as long as what it rests on
    assert drafts.draft(asks, 2) == [60, 61]
    assert drafts.draft(asks, 0) == []


def test_prompt_own_output_and_siblings_that_ended_are_read():
    drafts = Drafts()
    asks = joined(drafts, [1, 2, 3, 4, 5], [*FILLER, 1, 2, 3])
    assert drafts.draft(asks, 3) == [4, 5]
    asks.output_tokens += [*FILLER[:5]]
    assert drafts.draft(asks, 9) == FILLER[5:10]
    ended = joined(drafts, [1, 2, 3, 4, 5], [*range(200, 300)])
    drafts.leave(ended)
    asks.output_tokens += [210, 211, 212]
    assert drafts.draft(asks, 3) == [213, 214, 215]
    drafts.leave(asks)
    assert drafts.draft(asks, 3) == []
    again = joined(drafts, [1, 2, 3, 4, 5], [*FILLER, 210, 211, 212])
    assert drafts.draft(again, 3) == [], "the group went with its last member"


def test_a_text_that_grows_by_single_tokens_is_read_like_one_that_was_there():
    rng = random.Random(0)
    text = [rng.randrange(3) for _ in range(300)]
    whole, grown = Drafts(), Drafts()
    slow, asks = joined(grown, [1]), joined(grown, [1], FILLER)
    for token in text:
        slow.output_tokens.append(token)
        grown.draft(asks, 1)  # indexes what has come
    joined(whole, [1], text)
    for end in ([0, 1, 2], [2, 2, 2], [1, 0, 1], [0, 0, 0]):
        both = [joined(drafts, [1], FILLER + end) for drafts in (whole, grown)]
        assert whole.draft(both[0], 3) == grown.draft(both[1], 3) != []


def test_long_texts_do_not_burden_the_garbage_collector():
    rng = random.Random(0)
    drafts = Drafts()
    asks = [
        joined(drafts, [rng.randrange(10**6) for _ in range(900)], FILLER + [i]) for i in range(8)
    ]
    gc.collect()
    before = len(gc.get_objects())
    for sequence in asks:
        drafts.draft(sequence, 3)
    assert len(gc.get_objects()) - before < 500, "objects to scan do not grow with the tokens"


@pytest.mark.parametrize(
    "options",
    [{"frequency_penalty": 0.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.2}],
)
def test_draws_that_depend_on_earlier_ones_are_not_drafted(options):
    drafts = Drafts()
    asks = joined(drafts, [1], [*FILLER, *FILLER], **options)
    assert drafts.draft(asks, 4) == []
    assert drafts.best_length([asks], 4, lambda _: 0.1) == 0


def test_drafts_are_tried_where_they_came_true():
    drafts = Drafts()
    joined(drafts, [1], list(range(500)))
    agrees, differs = joined(drafts, [1], list(range(40))), joined(drafts, [1], list(range(40)))
    for i in range(40, 100):
        for sequence, drawn in ((agrees, i), (differs, 9000 + i)):
            drafts.learn(sequence, [drawn])
            sequence.output_tokens.append(drawn)

    def cost(length: int) -> float:
        return 1 + 0.1 * length

    assert drafts.best_length([agrees], 8, cost) == 8
    assert drafts.best_length([differs], 8, cost) == 0
    assert drafts.best_length([agrees], 8, lambda length: 1.0 + length) == 0
    # One of many does not pay for all.
    assert drafts.best_length([agrees, *[differs] * 9], 8, cost) == 0


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_num_equal_is_the_longest_common_beginning(left, right):
    count = num_equal(left, right)
    assert left[:count] == right[:count]
    assert count == min(len(left), len(right)) or left[count] != right[count]


# Through the engine.


def run(engine: NativeEngine, requests: list[GenRequest], updates: dict[int, int]):
    """`updates`: step -> seed of the weights loaded after it."""
    for request in requests:
        engine.add(request)
    done: dict[str, Finished] = {}
    for step in range(5000):
        if not engine.has_work:
            return done
        done |= {one.rid: replace(one, first_token_time=0.0) for one in engine.step()}
        if step in updates:
            weights = tiny_model("qwen3", seed=updates[step]).named_hf_tensors()
            engine.load_weights(weights, step, recompute_kv=updates[step] % 2 == 0)
    raise AssertionError(f"requests still run: {engine.stats()}")


def make_engine(**options) -> NativeEngine:
    options = {"page_size": 4, "num_pages": 400, "eos_ids": [1, 2]} | options
    return NativeEngine(tiny_model("qwen3"), **options)


def group_requests(seed: int) -> list[GenRequest]:
    """Siblings that often agree, of different lengths and ends."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 14))] for _ in range(2)]
    return [
        GenRequest(
            str(i),
            rng.choice(prompts),
            GenerationHyperparameters(
                seed=i,
                temperature=rng.choice([0.05, 0.1, 0.3]),
                greedy=rng.random() < 0.2,
                top_p=rng.choice([1.0, 0.9]),
                max_new_tokens=rng.randrange(30, 110),
                min_new_tokens=rng.choice([0, 0, 30]),
                stop_token_ids=[rng.randrange(VOCAB)],
                ignore_eos=rng.random() < 0.7,
                frequency_penalty=rng.choice([0.0] * 9 + [0.1]),
            ),
        )
        for i in range(rng.randrange(2, 9))
    ]


@pytest.fixture
def eager(monkeypatch):
    """Drafts are tried as soon as some come true."""
    monkeypatch.setattr(TorchRunner, "draft_cost", lambda *_: 1.0)


@pytest.mark.parametrize("num_pages", [400, 60])  # plenty, and so few that some are preempted
def test_outputs_are_bit_for_bit_those_without_drafts(eager, num_pages):
    num_drafted = num_accepted = 0
    for seed in range(5):
        requests = group_requests(seed)
        engine = make_engine(num_pages=num_pages)
        drafted = run(engine, requests, {})
        assert drafted == run_plain(num_pages, requests)
        num_drafted += engine.stats()["tokens_drafted"]
        num_accepted += engine.stats()["drafts_accepted"]
    assert num_drafted > num_accepted > 100


def run_plain(num_pages: int, requests: list[GenRequest]) -> dict[str, Finished]:
    engine = make_engine(num_pages=num_pages, drafts=False)
    done = run(engine, requests, {})
    assert engine.stats()["tokens_drafted"] == 0
    return done


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), first=st.integers(0, 60), second=st.integers(0, 60))
def test_new_weights_between_drafts(eager, seed, first, second):
    """Whenever they come, no token is lost and none keeps its page."""
    engine = make_engine()
    for done in run(engine, group_requests(seed), {first: 3, first + second + 1: 4}).values():
        assert len(done.output_tokens) == len(done.output_versions) == len(done.output_logprobs)
        assert done.output_versions == sorted(done.output_versions)
        assert all(logprob <= 0 for logprob in done.output_logprobs)
    engine.load_weights(engine.model.named_hf_tensors(), 10**6, recompute_kv=True)
    assert engine.stats()["pages_in_use"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_samples", [1, 3, 12])
def test_captured_graphs_check_drafts(monkeypatch, num_samples):
    """Guesses from an earlier run of the same seeds, in part wrong: tokens and log-probabilities
    are those drawn without, but for what rounding changes in bfloat16."""
    model = tiny_model("qwen3", head_dim=64, num_hidden_layers=2, vocab_size=512)
    model = model.to("cuda", torch.bfloat16)
    requests = [
        GenRequest(str(i), [5, 6, 7, 8], GenerationHyperparameters(max_new_tokens=64, seed=i))
        for i in range(num_samples)
    ]
    options = {"page_size": 16, "num_pages": 400}
    expected = run(NativeEngine(model, drafts=False, **options), requests, {})

    def guess(_, sequence, limit):
        num_tokens = len(sequence.output_tokens)
        tokens = expected[sequence.rid].output_tokens[num_tokens : num_tokens + limit]
        return [0 if (num_tokens + i) % 7 == 6 else token for i, token in enumerate(tokens)]

    monkeypatch.setattr(Drafts, "best_length", lambda self, sequences, limit, cost: limit)
    monkeypatch.setattr(Drafts, "draft", guess)
    engine = NativeEngine(model, **options)
    done = run(engine, requests, {})
    assert engine.stats()["drafts_accepted"] > 20 * num_samples
    num_same = 0
    for rid, one in done.items():
        count = num_equal(one.output_tokens, expected[rid].output_tokens)
        num_same += count
        logprobs = expected[rid].output_logprobs
        assert one.output_logprobs[:count] == pytest.approx(logprobs[:count], abs=0.05)
    assert num_same > 0.8 * 64 * num_samples  # a draw that lay on a boundary goes another way
