"""Properties under random schedules: same bits in any company, and no page is ever lost."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest

# Sizes that are no multiple of a vector register, and the demo's.
SHAPES = {
    "odd": {"vocab_size": 61, "hidden_size": 36, "intermediate_size": 50, "head_dim": 6},
    "demo": {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16},
    "wide": {"vocab_size": 300, "hidden_size": 896, "intermediate_size": 1024, "head_dim": 64},
    "moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "window": {"sliding_window": 9, "sliding_window_pattern": 2},
    "latent": {"q_lora_rank": 9},
    "hybrid": {"linear_key_head_dim": 7, "linear_value_head_dim": 9},
}


FAMILIES = {
    "moe": "qwen3_moe",
    "window": "gemma3_text",
    "latent": "deepseek_v2",
    "hybrid": "qwen3_5_moe_text",
}


@functools.cache
def model_of(shape: str):
    return tiny_model(FAMILIES.get(shape, "qwen3"), num_hidden_layers=2, **SHAPES[shape])


prompts = st.lists(st.integers(0, 49), min_size=1, max_size=70)
options = st.builds(
    GenerationHyperparameters,
    max_new_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.6, 1.0]),
    top_k=st.sampled_from([3, 10**8]),
    top_p=st.sampled_from([0.8, 1.0]),
    greedy=st.booleans(),
    seed=st.integers(0, 2**63),
)
requests = st.builds(lambda prompt, gconfig: (prompt, gconfig), prompts, options)
engines = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from([25, 40, 200]),  # 25: the longest request alone, no more
        "max_running": st.integers(1, 16),
        "max_prefill_tokens": st.sampled_from([5, 64, 1000]),
    }
)


def run(engine: NativeEngine, arrivals: list[tuple[int, GenRequest]]) -> dict[str, Finished]:
    """`arrivals`: (step before which it is added, request)."""
    done: dict[str, Finished] = {}
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            engine.add(arrivals.pop(0)[1])
        done |= {finished.rid: finished for finished in engine.step()}
        step += 1
        assert step < 3000, engine.stats()
    return done


def alone(shape: str, prompt: list[int], gconfig: GenerationHyperparameters) -> Finished:
    engine = NativeEngine(model_of(shape), page_size=4, num_pages=200)
    return run(engine, [(0, GenRequest("x", prompt, gconfig))])["x"]


@settings(max_examples=10)
@given(
    shape=st.sampled_from(["odd", "demo", "moe", "window", "latent", "hybrid"]),
    engine_options=engines,
    crowd=st.lists(st.tuples(st.integers(0, 9), requests), min_size=1, max_size=12),
    copies=st.integers(0, 3),
)
def test_a_request_has_the_same_bits_alone_and_in_any_company(shape, engine_options, crowd, copies):
    # Copies of one prompt arrive at different times: prefix hits of every kind.
    crowd = sorted(crowd + crowd[:1] * copies, key=lambda arrival: arrival[0])
    engine = NativeEngine(model_of(shape), page_size=4, **engine_options)
    arrivals = [(when, GenRequest(str(i), *req)) for i, (when, req) in enumerate(crowd)]
    done = run(engine, arrivals)
    for i, (_, (prompt, gconfig)) in enumerate(crowd):
        expected = alone(shape, prompt, gconfig)
        assert done[str(i)].output_tokens == expected.output_tokens
        assert done[str(i)].output_logprobs == expected.output_logprobs


def test_wide_layers_keep_the_bits_too():
    def gconfig(seed: int) -> GenerationHyperparameters:
        return GenerationHyperparameters(max_new_tokens=4, seed=seed)

    crowd = [([i] * (3 * i + 1), gconfig(i)) for i in range(12)]
    engine = NativeEngine(model_of("wide"), page_size=4, num_pages=200)
    done = run(engine, [(i % 2, GenRequest(str(i), *crowd[i])) for i in (0, 2, 4, 6, 8, 10)])
    for i in (0, 4, 10):
        assert done[str(i)].output_logprobs == alone("wide", *crowd[i]).output_logprobs


actions = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("update"), st.booleans()),
)


@settings(max_examples=40)
@given(engine_options=engines, schedule=st.lists(actions, max_size=40))
def test_random_schedules_end_every_request_and_lose_no_page(engine_options, schedule):
    model = model_of("odd")
    engine = NativeEngine(model, page_size=4, **engine_options)
    ended: list[str] = []
    num_added = version = 0
    for action, value in schedule:
        if action == "add":
            engine.add(GenRequest(str(num_added), *value))
            num_added += 1
        elif action == "step":
            for _ in range(value):
                ended += [finished.rid for finished in engine.step()]
        elif action == "abort" and (aborted := engine.abort(str(value))):
            ended.append(aborted.rid)
        elif action == "update":
            version += 1
            engine.load_weights(model.named_hf_tensors(), version, recompute_kv=value)
        stats = engine.stats()
        assert 0 <= stats["pages_in_use"] <= stats["pages_total"]
        assert stats["running"] + stats["waiting"] == num_added - len(ended)
    ended += run(engine, [])
    assert sorted(ended, key=int) == [str(i) for i in range(num_added)]
    engine.load_weights(model.named_hf_tensors(), version, recompute_kv=True)  # drops prefixes
    assert engine.stats()["pages_in_use"] == 0
