"""States of recurrent layers: what a schedule of requests leaves in them is never seen by another.

The model has layers with the gated delta rule and layers with attention. Every log-probability is
compared with one forward over the whole sequence, by the weights that drew the token.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.kv_cache import MIN_STATES
from areal.engine.native.sequence import Finished, GenRequest
from areal.models.common.attention import PackedAttention

PAGE = 4


@functools.cache
def weights(version: int):
    return tiny_model("qwen3_5_text", seed=version)


def make_engine(**options) -> NativeEngine:
    model = tiny_model("qwen3_5_text", seed=0)
    return NativeEngine(model, **{"page_size": PAGE, "num_pages": 60} | options)


def request(rid: str, prompt: list[int], num_tokens: int = 8, seed: int = 0) -> GenRequest:
    options = GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True, seed=seed)
    return GenRequest(rid, prompt, options)


def run(engine: NativeEngine) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    for _ in range(3000):
        if not engine.has_work:
            return done
        done |= {finished.rid: finished for finished in engine.step()}
    raise AssertionError(f"requests still run: {engine.stats()}")


@torch.no_grad()
def fresh_logprobs(version: int, tokens: list[int]) -> torch.Tensor:
    """log p [T, V] after each token, by one forward."""
    model = weights(version)
    attend = PackedAttention(torch.tensor([0, len(tokens)]), len(tokens))
    hidden = model(torch.tensor(tokens), attend.positions_T, attend)
    return torch.log_softmax(model.logits(hidden).double(), dim=-1)


def assert_fresh(prompt: list[int], done: Finished) -> None:
    tokens = prompt + done.output_tokens
    by_version = {v: fresh_logprobs(v, tokens) for v in set(done.output_versions)}
    expected = [
        float(by_version[version][len(prompt) - 1 + i, token])
        for i, (token, version) in enumerate(
            zip(done.output_tokens, done.output_versions, strict=True)
        )
    ]
    assert done.output_logprobs == pytest.approx(expected, abs=2e-5)


def assert_nothing_is_held(engine: NativeEngine) -> None:
    engine.load_weights(engine.model.named_hf_tensors(), engine.version, recompute_kv=True)
    stats = engine.stats()
    assert stats["pages_in_use"] == 0 and stats["states_in_use"] == 0


# Two tokens and short pages: prompts that begin alike, end at borders of pages, and are equal.
prompts = st.lists(st.integers(2, 3), min_size=1, max_size=18)
actions = st.one_of(
    st.tuples(st.just("add"), st.tuples(prompts, st.integers(1, 14), st.integers(1, 3))),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("update"), st.just(0)),
)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    num_pages=st.sampled_from([10, 16, 60]),  # 10: one request alone
    num_states=st.sampled_from([MIN_STATES, 12, 60]),
    max_running=st.integers(1, 6),
    max_prefill_tokens=st.sampled_from([3, 7, 100]),
    schedule=st.lists(actions, max_size=30),
)
def test_any_schedule_has_the_log_probabilities_of_fresh_computations(
    num_pages, num_states, max_running, max_prefill_tokens, schedule
):
    engine = make_engine(
        num_pages=num_pages,
        num_states=num_states,
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
    )
    asked: dict[str, list[int]] = {}
    done: dict[str, Finished] = {}
    version = 0
    for action, value in schedule:
        if action == "add":
            prompt, num_tokens, copies = value
            for seed in range(copies):
                rid = str(len(asked))
                asked[rid] = prompt
                engine.add(request(rid, prompt, num_tokens, seed))
        elif action == "step":
            for _ in range(value):
                done |= {finished.rid: finished for finished in engine.step()}
        elif action == "abort" and (aborted := engine.abort(str(value))):
            done[aborted.rid] = aborted
        elif action == "update":
            version = (version + 1) % 3
            engine.load_weights(weights(version).named_hf_tensors(), version, recompute_kv=True)
    done |= run(engine)
    assert done.keys() == asked.keys()
    for rid, finished in done.items():
        assert_fresh(asked[rid], finished)
    assert_nothing_is_held(engine)


def test_the_next_turn_of_a_dialogue_starts_from_the_state_at_the_last_border():
    engine, prompt = make_engine(), [5, 6, 7, 8, 9]
    engine.add(request("first", prompt, num_tokens=8))
    first = run(engine)["first"]
    turn = [*prompt, *first.output_tokens, 11, 12, 13]
    engine.add(request("second", turn))
    second = run(engine)["second"]
    assert second.cached_tokens == (len(prompt) + 8 - 1) // PAGE * PAGE
    assert_fresh(turn, second)


def test_prompts_that_leave_each_other_mark_the_place_for_the_third():
    engine, rng = make_engine(), random.Random(0)
    system = [rng.randrange(64) for _ in range(4 * PAGE)]
    cached = []
    for rid, question in enumerate([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13]]):
        engine.add(request(str(rid), system + question))
        done = run(engine)[str(rid)]
        assert_fresh(system + question, done)
        cached.append(done.cached_tokens)
    assert cached == [0, 0, len(system)]


@pytest.mark.parametrize("length", [3, 8, 9])  # within a page, whole pages, a partial last page
def test_a_group_computes_its_prompt_once_and_forks_its_state(length):
    engine, rng = make_engine(), random.Random(length)
    prompt = [rng.randrange(64) for _ in range(length)]
    for seed in range(5):
        engine.add(request(str(seed), prompt, seed=seed))
    done = run(engine)
    assert engine.stats()["tokens_prefilled"] == length
    assert len({tuple(finished.output_tokens) for finished in done.values()}) > 1
    for finished in done.values():
        assert_fresh(prompt, finished)
    assert_nothing_is_held(engine)


def test_preempted_sequences_compute_their_state_again():
    engine, rng = make_engine(num_pages=14), random.Random(2)
    asked = {str(i): [rng.randrange(64) for _ in range(rng.randrange(1, 12))] for i in range(8)}
    for rid, prompt in asked.items():
        engine.add(request(rid, prompt, num_tokens=24))
    done = run(engine)
    assert engine.stats()["preemptions"] > 3
    for rid, finished in done.items():
        assert_fresh(asked[rid], finished)


def test_no_token_is_drafted_because_states_cannot_go_back():
    engine = make_engine()
    engine.add(request("repeats", [4, 5] * 20, num_tokens=80))
    done = run(engine)["repeats"]
    assert engine.stats()["tokens_drafted"] == 0
    assert_fresh([4, 5] * 20, done)


def test_offloaded_states_come_back_by_computation():
    engine, prompt = make_engine(), [5, 6, 7, 8, 9, 10]
    engine.add(request("one", prompt, num_tokens=10))
    for _ in range(4):
        engine.step()
    engine.offload()
    engine.onload()
    assert_fresh(prompt, run(engine)["one"])


def test_too_few_states_are_refused():
    with pytest.raises(ValueError, match=f"num_states must be at least {MIN_STATES}, got 3"):
        make_engine(num_states=3)
