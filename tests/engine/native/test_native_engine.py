"""The native engine against a plain forward of the same weights, and its life of a request."""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, write_tiny_model
from tiny_vision import tiny_vision_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.native.tokenizer import read_eos_ids
from areal.models.common.attention import PackedAttention

VOCAB = 64


def make_engine(model=None, **options) -> NativeEngine:
    return NativeEngine(
        model or tiny_model("qwen3"), **{"page_size": 4, "num_pages": 200} | options
    )


def request(rid: str, prompt: list[int], **options) -> GenRequest:
    options = {"max_new_tokens": 12, "ignore_eos": True} | options
    return GenRequest(rid, prompt, GenerationHyperparameters(**options))


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def run(engine: NativeEngine, max_steps: int = 2000) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return done
        done |= {finished.rid: finished for finished in engine.step()}
    raise AssertionError(f"requests still run after {max_steps} steps: {engine.stats()}")


@torch.no_grad()
def full_forward_logprobs(model, prompt: list[int], output: list[int], temperature: float = 1.0):
    """log p of each output token by one forward over the whole sequence."""
    tokens = torch.tensor(prompt + output)
    attend = PackedAttention(torch.tensor([0, len(tokens)]), len(tokens))
    hidden = model(tokens, torch.arange(len(tokens)), attend)
    logprobs = torch.log_softmax(model.logits(hidden).double() / temperature, dim=-1)
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
    return logprobs[rows, tokens[len(prompt) :]].tolist()


def assert_matches_full_forward(model, req: GenRequest, done: Finished) -> None:
    expected = full_forward_logprobs(
        model, req.input_ids, done.output_tokens, req.gconfig.temperature
    )
    assert done.output_logprobs == pytest.approx(expected, abs=1e-5)


def pages_in_use_after_forgetting(engine: NativeEngine) -> float:
    """Pages held when no request runs and no prefix is kept."""
    engine.load_weights(engine.model.named_hf_tensors(), engine.version, recompute_kv=True)
    return engine.stats()["pages_in_use"]


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen3",
        "llama",
        "mistral",
        "qwen3_moe",
        "gemma3_text",
        "deepseek_v2",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    ],
)
def test_logprobs_equal_a_full_forward_for_mixed_lengths(family):
    model, rng = tiny_model(family), random.Random(0)
    engine = make_engine(model)
    requests = [
        request(
            str(i),
            random_prompt(rng, length),
            max_new_tokens=rng.randrange(1, 30),
            temperature=rng.choice([0.7, 1.0, 1.3]),
        )
        for i, length in enumerate([1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 40, 63])
    ]
    for req in requests:
        engine.add(req)
    done = run(engine)
    for req in requests:
        assert len(done[req.rid].output_tokens) == req.gconfig.max_new_tokens
        assert done[req.rid].stop_reason == "length"
        assert_matches_full_forward(model, req, done[req.rid])


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma3_text", "deepseek_v2", "qwen3_5_text"]
)
def test_logprobs_equal_a_full_forward_with_chunked_prefill(family):
    model, rng = tiny_model(family), random.Random(1)
    engine = make_engine(model, max_prefill_tokens=7)
    requests = [request(str(i), random_prompt(rng, 25)) for i in range(4)]
    for req in requests:
        engine.add(req)
    done = run(engine)
    for req in requests:
        assert_matches_full_forward(model, req, done[req.rid])


def test_logprobs_equal_a_full_forward_across_preemption():
    model, rng = tiny_model("qwen3"), random.Random(2)
    engine = make_engine(model, num_pages=14)
    requests = [
        request(str(i), random_prompt(rng, rng.randrange(1, 12)), max_new_tokens=24)
        for i in range(8)
    ]
    for req in requests:
        engine.add(req)
    done = run(engine)
    assert engine.stats()["preemptions"] > 3
    for req in requests:
        assert len(done[req.rid].output_tokens) == 24
        assert_matches_full_forward(model, req, done[req.rid])
    assert pages_in_use_after_forgetting(engine) == 0


@pytest.mark.parametrize("length", [3, 8, 9])  # within a page, whole pages, a partial last page
def test_a_group_computes_its_prompt_once(length):
    model, rng = tiny_model("qwen3"), random.Random(3)
    engine = make_engine(model)
    prompt = random_prompt(rng, length)
    group = [request(str(i), prompt, seed=i) for i in range(8)]
    for req in group:
        engine.add(req)
    engine.step()
    stats = engine.stats()
    assert (stats["tokens_prefilled"], stats["tokens_generated"]) == (length, 8)
    done = run(engine)
    assert engine.stats()["tokens_prefilled"] == length
    assert len({tuple(d.output_tokens) for d in done.values()}) > 4
    for req in group:
        assert_matches_full_forward(model, req, done[req.rid])


def test_a_late_sample_of_the_group_finds_the_prompt_computed():
    model, rng = tiny_model("qwen3"), random.Random(4)
    engine = make_engine(model)
    prompt = random_prompt(rng, 10)
    engine.add(request("early", prompt, seed=0))
    early = run(engine)["early"]
    late = [request("same seed", prompt, seed=0), request("other seed", prompt, seed=1)]
    for req in late:
        engine.add(req)
    done = run(engine)
    assert engine.stats()["tokens_prefilled"] == 10
    assert done["same seed"].output_logprobs == early.output_logprobs
    assert_matches_full_forward(model, late[1], done["other seed"])


def test_the_next_turn_is_computed_from_its_first_new_page_on():
    """Prompt and reply of the turn before are cached, but for its last token, in pages of 4."""
    model, rng = tiny_model("qwen3"), random.Random(4)
    engine = make_engine(model)
    first = request("first", random_prompt(rng, 10), max_new_tokens=9)
    engine.add(first)
    done = run(engine)
    prompt = first.input_ids + done["first"].output_tokens + random_prompt(rng, 5)
    turns = [request(f"{i}", prompt, seed=i) for i in range(2)]
    for req in turns:
        engine.add(req)
    done |= run(engine)
    cached = [done[name].cached_tokens for name in ("first", "0", "1")]
    assert cached == [0, 16, 16]
    assert engine.stats()["tokens_prefilled"] == 10 + len(prompt) - 16
    for req in turns:
        assert_matches_full_forward(model, req, done[req.rid])
    alone = make_engine(model)
    alone.add(turns[0])
    assert run(alone)["0"].output_logprobs == done["0"].output_logprobs, "bit for bit"
    assert pages_in_use_after_forgetting(engine) == 0


@pytest.mark.parametrize("num_pages", [16, 200])
def test_dialogues_that_share_pages_under_pressure(num_pages):
    model, rng = tiny_model("qwen3"), random.Random(6)
    engine = make_engine(model, num_pages=num_pages, max_prefill_tokens=6)
    system = random_prompt(rng, 6)
    chats = {str(i): system + random_prompt(rng, 1 + i % 5) for i in range(6)}
    for turn in range(3):
        requests = [request(f"{name}.{turn}", chat) for name, chat in chats.items()]
        for req in requests:
            engine.add(req)
        done = run(engine)
        for req in requests:
            out = done[req.rid]
            assert 0 <= out.cached_tokens <= len(req.input_ids)
            assert_matches_full_forward(model, req, out)
            chats[req.rid.split(".")[0]] = req.input_ids + out.output_tokens[:3]
    assert pages_in_use_after_forgetting(engine) == 0


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_reply_of_other_weights_is_never_shared(is_kept):
    """A sequence that went on after an update with its old cache leaves nothing behind."""
    new, rng = tiny_model(seed=1), random.Random(3)
    engine = make_engine(tiny_model(seed=0))
    first = request("first", random_prompt(rng, 8), max_new_tokens=12)
    engine.add(first)
    engine.step()
    engine.step()
    engine.load_weights(new.named_hf_tensors(), 1, recompute_kv=not is_kept)
    reply = run(engine)["first"].output_tokens
    later = request("later", first.input_ids + reply + random_prompt(rng, 3))
    engine.add(later)
    out = run(engine)["later"]
    assert out.cached_tokens == (0 if is_kept else 16)
    assert_matches_full_forward(new, later, out)
    assert pages_in_use_after_forgetting(engine) == 0


turns = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 9)),  # dialogue, new tokens
    st.tuples(st.just("edit"), st.integers(0, 3), st.integers(1, 9)),  # ... after a part of it
    st.tuples(st.just("step"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("update"), st.booleans(), st.just(0)),
)


@settings(max_examples=60)
@given(num_pages=st.sampled_from([14, 22, 200]), schedule=st.lists(turns, max_size=40))
def test_any_schedule_of_dialogues_gives_the_logprobs_of_a_fresh_computation(num_pages, schedule):
    rng, models = random.Random(len(schedule)), [tiny_model(seed=seed) for seed in range(2)]
    engine = make_engine(tiny_model(seed=0), num_pages=num_pages, max_prefill_tokens=6)
    chats = [random_prompt(rng, 5) for _ in range(4)]
    running: dict[str, GenRequest] = {}
    mixed: set[str] = set()  # those that kept a cache of older weights
    version = num_asked = 0

    def end(finished) -> None:
        req = running.pop(finished.rid)
        chats[int(finished.rid[0])] = req.input_ids + finished.output_tokens
        assert 0 <= finished.cached_tokens < len(req.input_ids)
        for number, model in enumerate(models):
            expected = full_forward_logprobs(
                model, req.input_ids, finished.output_tokens, req.gconfig.temperature
            )
            drawn = zip(finished.output_versions, finished.output_logprobs, expected, strict=True)
            found = [(got, want) for at, got, want in drawn if at % 2 == number]
            if finished.rid not in mixed:
                assert [got for got, _ in found] == pytest.approx([w for _, w in found], abs=1e-5)

    for action, value, count in [*schedule, ("step", 300, 0)]:
        if action in ("ask", "edit") and f"{value}" not in {rid[0] for rid in running}:
            begin = chats[value][: rng.randrange(len(chats[value]))] if action == "edit" else None
            prompt = (chats[value] if begin is None else begin) + random_prompt(rng, count)
            chats[value] = prompt if len(prompt) < 36 else random_prompt(rng, 5)
            req = request(f"{value}.{num_asked}", chats[value], seed=num_asked, max_new_tokens=7)
            num_asked += 1
            running[req.rid] = req
            engine.add(req)
        elif action == "step":
            for _ in range(value):
                for finished in engine.step():
                    end(finished)
        elif action == "abort":
            rid = next((rid for rid in running if rid[0] == f"{value}"), "none")
            if (aborted := engine.abort(rid)) is not None:
                end(aborted)
        elif action == "update":
            version += 1
            weights = models[version % 2].named_hf_tensors()
            engine.load_weights(weights, version, recompute_kv=value)
            mixed |= set() if value else set(running)
    assert not running
    assert pages_in_use_after_forgetting(engine) == 0


def test_a_weight_update_while_a_prompt_is_computed_after_borrowed_pages():
    old, new, rng = tiny_model(seed=0), tiny_model(seed=1), random.Random(7)
    engine = make_engine(tiny_model(seed=0), max_prefill_tokens=8)
    running = request("running", random_prompt(rng, 8), max_new_tokens=24)
    engine.add(running)
    engine.step()
    late = request("late", running.input_ids + random_prompt(rng, 20))
    engine.add(late)
    engine.step()  # has begun with the pages of the first
    engine.load_weights(new.named_hf_tensors(), 1, recompute_kv=False)
    done = run(engine)
    assert_matches_full_forward(new, late, done["late"])
    assert done["running"].output_versions[:2] == [0, 0]
    before = full_forward_logprobs(old, running.input_ids, done["running"].output_tokens)[:2]
    assert done["running"].output_logprobs[:2] == pytest.approx(before, abs=1e-5)
    assert pages_in_use_after_forgetting(engine) == 0


def test_samples_of_a_group_share_the_full_pages_of_the_prompt():
    engine = make_engine()
    prompt = list(range(17))  # four full pages of 4 and one token
    for i in range(8):
        engine.add(request(str(i), prompt))
    engine.step()
    assert (
        engine.stats()["pages_in_use"] == 4 + 1 + 8
    )  # shared, the prefix's partial, one copy each


def test_a_weight_update_recomputes_the_cache_and_stamps_versions():
    old, new, rng = tiny_model(seed=0), tiny_model(seed=1), random.Random(5)
    engine = make_engine(tiny_model(seed=0))
    shared = random_prompt(rng, 9)
    requests = [request(str(i), random_prompt(rng, i + 1)) for i in range(5)]
    requests += [request(f"group {i}", shared, seed=i) for i in range(4)]
    for req in requests:
        engine.add(req)
    for _ in range(5):
        engine.step()
    prefilled = engine.stats()["tokens_prefilled"]
    engine.load_weights(new.named_hf_tensors(), 7, recompute_kv=True)
    done = run(engine)
    for req in requests:
        out = done[req.rid]
        assert out.output_versions == [0] * 5 + [7] * 7
        before = full_forward_logprobs(old, req.input_ids, out.output_tokens)[:5]
        after = full_forward_logprobs(new, req.input_ids, out.output_tokens)[5:]
        assert out.output_logprobs == pytest.approx(before + after, abs=1e-5)
    # Five outputs of each are computed again, every distinct prompt once.
    again = engine.stats()["tokens_prefilled"] - prefilled
    assert again == 5 * len(requests) + (1 + 2 + 3 + 4 + 5) + 9


def test_a_weight_update_may_keep_the_cache():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = make_engine(tiny_model(seed=0))
    req = request("a", [5, 6, 7])
    engine.add(req)
    for _ in range(4):
        engine.step()
    engine.load_weights(new.named_hf_tensors(), 1, recompute_kv=False)
    engine.add(request("b", [5, 6, 7]))  # the old prefix must not serve new requests
    done = run(engine)
    assert engine.stats()["tokens_prefilled"] == 3 + 3
    assert done["a"].output_versions == [0] * 4 + [1] * 8
    before = full_forward_logprobs(old, req.input_ids, done["a"].output_tokens)[:4]
    assert done["a"].output_logprobs[:4] == pytest.approx(before, abs=1e-5)
    assert_matches_full_forward(new, request("b", [5, 6, 7]), done["b"])


def test_a_half_computed_prompt_starts_again_with_new_weights():
    new, rng = tiny_model(seed=1), random.Random(6)
    engine = make_engine(tiny_model(seed=0), max_prefill_tokens=4)
    req = request("a", random_prompt(rng, 10))
    engine.add(req)
    engine.step()
    engine.load_weights(new.named_hf_tensors(), 1, recompute_kv=False)
    assert_matches_full_forward(new, req, run(engine)["a"])


def test_wrong_weights_are_refused_before_the_first_copy():
    engine = make_engine(tiny_model(seed=0))
    engine.add(request("a", [1, 2, 3], seed=0))
    expected = run(engine)["a"].output_logprobs
    named = dict(tiny_model(seed=1).named_hf_tensors())
    last = list(named)[-1]
    with pytest.raises(ValueError, match=f"missing {last}"):
        engine.load_weights([(n, t) for n, t in named.items() if n != last], 1, recompute_kv=True)
    with pytest.raises(ValueError, match="expected"):
        wrong = named | {last: torch.zeros(3)}
        engine.load_weights(iter(wrong.items()), 1, recompute_kv=True)
    assert engine.version == 0
    engine.add(request("a", [1, 2, 3], seed=0))
    assert run(engine)["a"].output_logprobs == expected


def test_stop_tokens_end_a_request_and_min_new_tokens_holds_them_off():
    model = tiny_model("qwen3")
    engine = make_engine(model, eos_ids=range(32))
    engine.add(request("eos", [3, 4], ignore_eos=False, max_new_tokens=50))
    engine.add(request("ignored", [3, 4], max_new_tokens=50))
    engine.add(request("own", [3, 4], stop_token_ids=list(range(32, 64)), max_new_tokens=50))
    held = request("held", [3, 4], ignore_eos=False, min_new_tokens=6, max_new_tokens=50)
    engine.add(held)
    done = run(engine)
    assert done["eos"].stop_reason == "stop" and done["eos"].output_tokens[-1] < 32
    assert all(token >= 32 for token in done["eos"].output_tokens[:-1])
    assert done["ignored"].stop_reason == "length" and len(done["ignored"].output_tokens) == 50
    assert done["own"].stop_reason == "stop" and done["own"].output_tokens[-1] >= 32
    assert all(token >= 32 for token in done["held"].output_tokens[:6])
    assert len(done["held"].output_tokens) > 6 and done["held"].output_tokens[-1] < 32


def test_lengths_end_where_max_tokens_context_or_cache_says():
    engine = make_engine(tiny_model(max_position_embeddings=40), num_pages=9)
    limits = {"request": {"max_tokens": 10}, "cache": {"max_new_tokens": 100}}
    for rid, options in limits.items():
        engine.add(request(rid, [1, 2, 3], **options))
    done = run(engine)
    # 8 usable pages of 4; the prompt's partial page is held twice, by the prefix and by its copy.
    assert {rid: 3 + len(d.output_tokens) for rid, d in done.items()} == {
        "request": 10,
        "cache": 28,
    }
    roomy = make_engine(tiny_model(max_position_embeddings=40))
    roomy.add(request("context", [1, 2, 3], max_new_tokens=100))
    assert 3 + len(run(roomy)["context"].output_tokens) == 40


def test_greedy_follows_the_argmax_of_a_full_forward():
    model = tiny_model("qwen2")
    engine = make_engine(model)
    engine.add(request("a", [9, 8, 7], greedy=True))
    out = run(engine)["a"].output_tokens
    tokens = torch.tensor([9, 8, 7, *out])
    with torch.no_grad():
        attend = PackedAttention(torch.tensor([0, len(tokens)]), len(tokens))
        logits = model.logits(model(tokens, torch.arange(len(tokens)), attend))
    assert logits[2:-1].argmax(-1).tolist() == out


@pytest.mark.parametrize(("temperature", "logprob"), [(1e-308, 0.0), (1e308, -math.log(VOCAB))])
def test_a_temperature_beyond_all_is_still_a_distribution(temperature, logprob):
    engine = make_engine()
    engine.add(request("a", [3, 4, 5], temperature=temperature))
    done = run(engine)["a"]
    assert done.output_logprobs == pytest.approx([logprob] * 12)


def test_abort_returns_what_a_request_has_wherever_it_is():
    engine = make_engine(max_running=1, max_prefill_tokens=4)
    for rid in ("decoding", "waiting"):
        engine.add(request(rid, [1, 2, 3]))
    engine.step()
    engine.step()
    stopped = engine.abort("decoding")
    assert len(stopped.output_tokens) == len(stopped.output_logprobs) == 2
    assert stopped.stop_reason == "abort"
    assert engine.abort("waiting").output_tokens == []
    engine.add(request("filling", list(range(9))))
    engine.step()
    assert engine.abort("filling").output_tokens == []
    assert engine.abort("unknown") is None
    assert not engine.has_work and engine.step() == []
    assert pages_in_use_after_forgetting(engine) == 0


def test_the_rest_of_a_group_goes_on_when_one_aborts_during_its_prefill():
    model = tiny_model("qwen3")
    engine = make_engine(model, max_prefill_tokens=4)
    group = [request(str(i), list(range(10)), seed=i) for i in range(3)]
    for req in group:
        engine.add(req)
    engine.step()
    engine.abort("0")
    done = run(engine)
    assert engine.stats()["tokens_prefilled"] == 10
    for req in group[1:]:
        assert_matches_full_forward(model, req, done[req.rid])


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "input_ids is empty"),
        ([1, VOCAB], {}, r"input_ids must lie in \[0, 64\).*got 1 to 64"),
        ([-1], {}, "input_ids must lie in"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids must lie in"),
        ([1] * 10, {"max_tokens": 10}, r"gconfig.max_tokens \(10\)"),
        ([1] * 900, {}, "raise num_pages"),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt, options, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add(request("a", prompt, **options))
    assert not engine.has_work


def test_a_rid_is_taken_until_it_ends():
    engine = make_engine()
    engine.add(request("a", [1]))
    with pytest.raises(ValueError, match="'a' is already running"):
        engine.add(request("a", [2]))
    run(engine)
    engine.add(request("a", [2]))


def test_unseeded_requests_follow_the_engine_seed():
    def outputs(seed: int) -> list[list[int]]:
        engine = make_engine(seed=seed)
        for i in range(3):
            engine.add(request(str(i), [1, 2]))
        return [done.output_tokens for done in run(engine).values()]

    assert outputs(0) == outputs(0) != outputs(1)
    assert len({tuple(tokens) for tokens in outputs(0)}) == 3


def test_from_pretrained_serves_the_folder(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "qwen3")
    assert read_eos_ids(folder) == [1]
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert read_eos_ids(folder) == [1, 5]
    engine = NativeEngine.from_pretrained(folder)
    req = request("a", [4, 5, 6])
    engine.add(req)
    assert_matches_full_forward(tiny_model("qwen3"), req, run(engine)["a"])


@torch.no_grad()
def logits_of(model, tokens: list[int]) -> torch.Tensor:
    attend = PackedAttention(torch.tensor([0, len(tokens)]), len(tokens))
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    return model.logits(hidden).double()


def test_penalties_count_the_output_and_repetitions_the_prompt_too():
    model = tiny_model("qwen3")
    given = {"presence_penalty": 0.75, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    req = request("a", [5, 6, 7, 5], logit_bias={9: 3.0, 11: -100}, max_new_tokens=24, **given)
    for num_pages in (200, 9):  # once in between preempted
        engine = make_engine(model, num_pages=num_pages)
        engine.add(req)
        if num_pages == 9:
            engine.add(request("b", [1, 2, 3], max_new_tokens=16))
        out = run(engine)["a"]
        tokens = req.input_ids + out.output_tokens
        logits = logits_of(model, tokens)
        for i in range(len(out.output_tokens)):
            row, seen = logits[len(req.input_ids) + i - 1].clone(), tokens[: len(req.input_ids) + i]
            row[9] += 3.0
            row[11] -= 100
            for token in set(seen):
                row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
            for token in out.output_tokens[:i]:
                row[token] -= 0.5
            for token in set(out.output_tokens[:i]):
                row[token] -= 0.75
            expected = torch.log_softmax(row, -1)[out.output_tokens[i]].item()
            assert out.output_logprobs[i] == pytest.approx(expected, abs=1e-5)
        assert 11 not in out.output_tokens


def test_a_bias_for_no_token_of_the_model_is_refused():
    with pytest.raises(ValueError, match="logit_bias must name tokens of the model's vocabulary"):
        make_engine().add(request("a", [5], logit_bias={10**6: 1.0}))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "qwen2_5_vl"])
def test_an_engine_is_freed_as_soon_as_nobody_holds_it(family):
    """Without the garbage collector, which leaves alone what was there when a run began."""
    model = tiny_vision_model(family) if family == "qwen2_5_vl" else tiny_model(family)
    engine = make_engine(model)
    engine.add(request("a", [5, 6, 7]))
    run(engine)
    seen = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert seen() is None
    finally:
        gc.enable()
