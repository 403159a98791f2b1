"""Prompts with images in the native engine: log-probabilities of a fresh forward, always."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from engine.train.archon_world import open_engine, train
from hypothesis import given, settings
from hypothesis import strategies as st
from image_prompts import END, IMAGE, START, picture, write_seeing_model, write_tokenizer
from tiny_vision import tiny_vision_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.native.tokenizer import ModelText
from areal.models.common.attention import PackedAttention
from areal.models.common.image_attention import ImageAttention
from areal.models.vision.positions import mrope_positions
from areal.models.vision.tower import Images

FAMILY = "qwen2_5_vl"
PICTURES = [picture(0, 16, 24), picture(1, 16, 24), picture(2, 8, 8), picture(3, 40, 16)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return ModelText(write_seeing_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def models():
    return [tiny_vision_model(FAMILY, seed) for seed in range(2)]


def make_engine(model, **options) -> NativeEngine:
    return NativeEngine(model, **{"page_size": 4, "num_pages": 200} | options)


def request(text, rid, prompt, pictures=(), **options) -> GenRequest:
    options = {"max_new_tokens": 8, "ignore_eos": True, "seed": 0} | options
    asked = GenRequest(rid, prompt, GenerationHyperparameters(**options), image_data=list(pictures))
    return text.prepare(asked)


def seen(*before: int) -> list[int]:
    """A prompt with one image."""
    return [*before, START, IMAGE, END, 7]


def run(engine: NativeEngine, max_steps: int = 2000) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return done
        done |= {one.rid: one for one in engine.step()}
    raise AssertionError(f"requests still run after {max_steps} steps: {engine.stats()}")


@torch.no_grad()
def fresh_logprobs(model, req: GenRequest, output: list[int]) -> list[float]:
    """log p of each output token by one forward of the whole sequence, tower included."""
    tokens = torch.tensor(req.input_ids + output)
    args, sight, rows = model.args.vision, None, None
    grids = []
    if req.images is not None:
        cut = [image.patches for image in req.images.images]
        grids = [one.grid for one in cut]
        pixels = torch.from_numpy(np.concatenate([one.pixels for one in cut]))
        sight = model.look(Images(pixels, torch.tensor(grids)))
        rows = (tokens == IMAGE).nonzero().squeeze(1)
    attend = PackedAttention(torch.tensor([0, len(tokens)]), len(tokens))
    positions = attend.positions_T
    if args.has_axes:
        positions = torch.from_numpy(mrope_positions(tokens.numpy(), grids, args))
    if args.is_bidirectional and req.images is not None:
        attend = ImageAttention(attend, [(0, *span) for span in req.images.spans])
    logits = model.logits(model(tokens, positions, attend, sight, rows)).double()
    logits[:, list(args.placeholder_ids)] = -torch.inf
    logprobs = torch.log_softmax(logits / req.gconfig.temperature, dim=-1)
    places = torch.arange(len(req.input_ids) - 1, len(tokens) - 1)
    return logprobs[places, tokens[len(req.input_ids) :]].tolist()


def assert_is_fresh(model, req: GenRequest, done: Finished) -> None:
    expected = fresh_logprobs(model, req, done.output_tokens)
    # Recurrent layers: the engine adds token by token, a forward chunk by chunk.
    atol = 1e-5 if model.args.delta is None else 1e-4
    assert done.output_logprobs == pytest.approx(expected, abs=atol)


def mixed_requests(text) -> list[GenRequest]:
    first, second, small, tall = PICTURES
    return [
        request(text, "one", seen(3, 4), [first]),
        request(text, "other", seen(3, 4), [second], temperature=0.7),
        request(text, "two", [*seen(5), *seen(6)], [small, tall], max_new_tokens=20),
        request(text, "again", [*seen(5), *seen(6)], [tall, small]),
        request(text, "words", [5, 6, 7], max_new_tokens=12),
        request(text, "side by side", [START, IMAGE, IMAGE, END], [small, small]),
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_5_vl", {}),
        ("qwen2_5_vl", {"max_prefill_tokens": 3}),
        ("qwen2_5_vl", {"num_pages": 12}),
        ("qwen3_vl", {"max_prefill_tokens": 3, "num_pages": 12}),
        ("qwen3_5", {"max_prefill_tokens": 3, "num_pages": 12}),
        ("qwen3_5_moe", {}),
    ],
)
def test_logprobs_equal_a_fresh_forward(text, family, options):
    model = tiny_vision_model(family)
    engine = make_engine(model, **options)
    requests = mixed_requests(text)
    for req in requests:
        engine.add(req)
    done = run(engine)
    for req in requests:
        assert_is_fresh(model, req, done[req.rid])
    if "num_pages" in options:
        assert engine.stats()["preemptions"] > 0


@pytest.fixture(scope="module")
def square_text(tmp_path_factory):
    """Of a family whose images have one size, and whose image tokens see each other."""
    return ModelText(write_seeing_model(tmp_path_factory.mktemp("gemma3"), "gemma3"))


def square(*before: int) -> list[int]:
    return [*before, START, *[IMAGE] * 9, END, 7]


def square_requests(text) -> list[GenRequest]:
    first, second, small, tall = PICTURES
    return [
        request(text, "one", square(3, 4), [first]),
        request(text, "other", square(3, 4), [second], temperature=0.7),
        request(text, "two", [*square(5), *square(6, 7, 8)], [small, tall], max_new_tokens=20),
        request(text, "longer", [*square(3, 4), 8, *square(9)], [first, first]),
        request(text, "words", [5, 6, 7, 8, 9, 10, 11, 12, 13], max_new_tokens=12),
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_prefill_tokens": 9}, {"max_prefill_tokens": 11, "num_pages": 14}, {"page_size": 2}],
)
def test_tokens_that_see_all_of_their_image(square_text, options):
    model = tiny_vision_model("gemma3")
    engine = make_engine(model, **options)
    requests = square_requests(square_text)
    for req in requests:
        engine.add(req)
    done = run(engine)
    again = request(square_text, "again", [*requests[0].input_ids, 9], [PICTURES[0]])
    engine.add(again)
    done |= run(engine)
    for req in [*requests, again]:
        assert_is_fresh(model, req, done[req.rid])
    if "num_pages" in options:
        assert engine.stats()["preemptions"] > 0
    else:
        assert done["again"].cached_tokens > 4


def test_what_a_chat_template_writes_becomes_a_whole_image(tmp_path):
    folder = write_seeing_model(tmp_path, "gemma3")
    (line,) = write_tokenizer(folder).encode("\n", add_special_tokens=False)
    shown = [line, line, START, *[IMAGE] * 9, END, line, line]
    read = request(ModelText(folder), "r", [5, START, 7, line, START], PICTURES[:2])
    assert read.input_ids == [5, *shown, 7, line, *shown]


def test_an_image_that_is_computed_at_once_must_fit(square_text):
    with pytest.raises(ValueError, match="max_prefill_tokens must be at least 9"):
        make_engine(tiny_vision_model("gemma3"), max_prefill_tokens=8)
    with pytest.raises(ValueError, match="images 0 and 1 of a sequence touch"):
        request(square_text, "r", [START, *[IMAGE] * 18, END], [PICTURES[0]] * 2)
    with pytest.raises(ValueError, match="expected 1 of token 62, one for each, or 9"):
        request(square_text, "r", [START, IMAGE, END], [PICTURES[0]])
    with pytest.raises(ValueError, match=r"no tokenizer"):
        request(square_text, "r", [5, START, 7], [PICTURES[0]])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_request_does_not_depend_on_what_runs_beside_it(request, family):
    mixed, wanted = mixed_requests, "text"
    if family == "gemma3":
        mixed, wanted = square_requests, "square_text"
    text, model = request.getfixturevalue(wanted), tiny_vision_model(family)
    alone = {}
    for req in mixed(text):
        engine = make_engine(model)
        engine.add(req)
        alone |= run(engine)
    for options in ({}, {"max_prefill_tokens": 9, "num_pages": 14}):
        engine = make_engine(model, **options)
        for req in mixed(text):
            engine.add(req)
        together = run(engine)
        for rid, done in alone.items():
            assert together[rid].output_tokens == done.output_tokens
            assert together[rid].output_logprobs == done.output_logprobs


def test_an_image_is_looked_at_once_for_all_who_show_it(text, models):
    engine = make_engine(models[0])
    for number in range(6):
        engine.add(request(text, f"s{number}", seen(3), [PICTURES[0]], seed=number))
    engine.add(request(text, "other prompt", seen(9, 9, 9), [PICTURES[0]]))
    done = run(engine)
    assert engine.stats()["images_seen"] == 1
    prompt = len(request(text, "p", seen(3), [PICTURES[0]]).input_ids)
    assert engine.stats()["tokens_prefilled"] == prompt + prompt + 2
    assert len({tuple(done[f"s{number}"].output_tokens) for number in range(6)}) > 1


def test_prompts_that_differ_only_in_their_image_share_no_page_behind_it(text, models):
    engine = make_engine(models[0])
    first = request(text, "first", seen(1, 2, 3, 4), [PICTURES[0]])
    other = request(text, "other", seen(1, 2, 3, 4), [PICTURES[1]])
    again = request(text, "again", [*first.input_ids, 8], [PICTURES[0]])
    for req in (first, other, again):
        engine.add(req)
        done = run(engine)
        assert_is_fresh(models[0], req, done[req.rid])
        if req is other:
            assert done["other"].cached_tokens == 4  # the page before the image
        if req is again:
            assert done["again"].cached_tokens == len(first.input_ids) // 4 * 4


def test_the_next_turn_finds_prompt_image_and_reply(text, models):
    engine = make_engine(models[0])
    first = request(text, "first", seen(1, 2, 3), [PICTURES[0]])
    engine.add(first)
    said = run(engine)["first"].output_tokens
    turn = [*first.input_ids, *said, *seen(4)]
    second = request(text, "second", turn, [PICTURES[0], PICTURES[2]])
    engine.add(second)
    done = run(engine)["second"]
    assert done.cached_tokens >= len(first.input_ids)
    assert_is_fresh(models[0], second, done)
    assert engine.stats()["images_seen"] == 2


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_new_weights_see_anew(text, models, recompute_kv):
    """Also the tower's: the same image in a new prompt is looked at with the new weights."""
    engine = make_engine(tiny_vision_model(FAMILY, 0), max_prefill_tokens=4)
    running = request(text, "running", seen(1, 2), [PICTURES[0]], max_new_tokens=16)
    engine.add(running)
    for _ in range(7):
        engine.step()
    engine.load_weights(models[1].named_hf_tensors(), 1, recompute_kv=recompute_kv)
    new = request(text, "new", seen(8), [PICTURES[0]])
    engine.add(new)
    done = run(engine)
    assert_is_fresh(models[1], new, done["new"])
    assert set(done["running"].output_versions) == {0, 1}
    if recompute_kv:
        assert_is_of_its_versions(models, running, done["running"])


def assert_is_of_its_versions(models, req: GenRequest, done: Finished) -> None:
    for version in set(done.output_versions):
        expected = fresh_logprobs(models[version % 2], req, done.output_tokens)
        for place, own in enumerate(done.output_versions):
            if own == version:
                assert done.output_logprobs[place] == pytest.approx(expected[place], abs=1e-5)


def test_the_trainer_computes_what_was_drawn_before_and_after_a_step(text, tmp_path):
    folder = write_seeing_model(tmp_path)
    trainer = open_engine(str(folder), "archon:d1")
    engine = NativeEngine.from_pretrained(folder, page_size=4, num_pages=100)
    for version in range(2):
        requests = mixed_requests(text)
        for req in requests:
            engine.add(req)
        done = run(engine)
        batch = batch_of(requests, done)
        found = trainer.forward_batch(batch)
        for row, req in enumerate(requests):
            drawn, first = done[req.rid].output_logprobs, len(req.input_ids) - 1
            expected = found[row, first : first + len(drawn)]
            if req.gconfig.temperature == 1:
                assert drawn == pytest.approx(expected.tolist(), abs=1e-5)
        if version == 0:
            train(trainer, batch)
            engine.load_weights(trainer.hf_weights(), 1, recompute_kv=True)


def batch_of(requests: list[GenRequest], done: dict[str, Finished]) -> dict[str, Any]:
    rows = [torch.tensor(req.input_ids + done[req.rid].output_tokens) for req in requests]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).int()
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    learned = (
        torch.arange(ids.shape[1])
        >= torch.tensor([len(r.input_ids) - 1 for r in requests])[:, None]
    )
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": (learned & (torch.arange(ids.shape[1]) < lengths[:, None] - 1)),
        "multi_modal_input": [pixels_of(req) for req in requests],
    }


def pixels_of(req: GenRequest) -> dict[str, torch.Tensor]:
    if req.images is None:
        return {}
    cut = [image.patches for image in req.images.images]
    return {
        "pixel_values": torch.from_numpy(np.concatenate([one.pixels for one in cut])),
        "image_grid_thw": torch.tensor([one.grid for one in cut]),
    }


def test_a_placeholder_is_never_drawn(text, models):
    """However much the model wants one."""
    model = tiny_vision_model(FAMILY, 0)
    wanted = list(model.args.vision.placeholder_ids)
    with torch.no_grad():
        model.output_weight[wanted] *= 50
    engine = make_engine(model)
    requests = [
        request(text, f"{number}", seen(number), [PICTURES[0]], seed=number, **options)
        for number, options in enumerate(
            [{}, {"greedy": True}, {"temperature": 2.0}, {"top_p": 0.5}, {"top_k": 2}]
        )
    ]
    for req in requests:
        engine.add(req)
    done = run(engine)
    for one in done.values():
        assert not set(one.output_tokens) & set(wanted)
        assert np.isfinite(one.output_logprobs).all()
    assert_is_fresh(model, requests[0], done["0"])


@pytest.mark.parametrize(
    ("prompt", "pictures", "says"),
    [
        ([5, 6], [PICTURES[0]], "0 image tokens .60. for 1 images"),
        (seen(5), PICTURES[:2], "1 image tokens .60. for 2 images"),
        ([5, *[IMAGE] * 5], [PICTURES[0]], "5 image tokens"),
        ([IMAGE, 5, *[IMAGE] * 5], [PICTURES[0]], "in a row"),
        (seen(5), ["no base64"], r"image_data\[0\]: an image is base64"),
        (seen(5), ["AAAA"], r"image_data\[0\]: the image begins with"),
        (seen(5), ["https://example.com/a.png"], "not fetched"),
        (seen(5), [picture(0, 1, 300)], "200 times"),
        (seen(5), [PICTURES[0]] * 300, "at most 256"),
    ],
)
def test_images_that_do_not_fit_their_prompt_are_refused(text, prompt, pictures, says):
    with pytest.raises(ValueError, match=says):
        request(text, "r", prompt, pictures)


def test_image_tokens_without_images_are_refused(text, models):
    engine = make_engine(models[0])
    with pytest.raises(ValueError, match="image_data is empty"):
        engine.add(request(text, "r", seen(5)))
    so_far = request(text, "s", [5, 6])
    assert not engine.has_work
    engine.add(so_far)
    assert_is_fresh(models[0], so_far, run(engine)["s"])


def test_text_is_scored_as_it_is_drawn_and_images_are_not(text, models):
    engine = make_engine(models[0])
    words = request(text, "words", [5, 6, 7])
    engine.add(words)
    done = run(engine)["words"]
    (scored,) = engine.score([[5, 6, 7, *done.output_tokens]])
    assert scored.logprobs[2:-1] == pytest.approx(done.output_logprobs, abs=1e-5)
    with pytest.raises(ValueError, match="only text is scored"):
        engine.score([[5, IMAGE, 7]])


def test_a_model_of_text_refuses_images(tmp_path):
    from tiny import write_tiny_model

    blind = ModelText(write_tiny_model(tmp_path, "qwen3"))
    with pytest.raises(ValueError, match="no vision tower"):
        request(blind, "r", [5], [PICTURES[0]])


steps = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(
        st.just("add"),
        st.lists(st.sampled_from([0, 1, 2, 3, None, None]), max_size=3),  # pictures and words
        st.integers(1, 12),
    ),
    st.tuples(st.just("update")),
    st.tuples(st.just("abort")),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(steps, min_size=3, max_size=14), st.sampled_from([2, 5, 64]), st.booleans())
def test_any_schedule_has_the_logprobs_of_a_fresh_forward(text, models, plan, chunk, few):
    engine = make_engine(
        tiny_vision_model(FAMILY, 0), max_prefill_tokens=chunk, num_pages=16 if few else 100
    )
    requests: dict[str, GenRequest] = {}
    done: dict[str, Finished] = {}
    for number, (what, *more) in enumerate(plan):
        if what == "add":
            shown, length = more
            prompt = [2, *(token for one in shown for token in ([5] if one is None else seen(4)))]
            pictures = [PICTURES[one] for one in shown if one is not None]
            req = request(text, f"r{number}", prompt, pictures, max_new_tokens=length, seed=number)
            requests[req.rid] = req
            engine.add(req)
        elif what == "update":
            version = engine.version + 1
            engine.load_weights(models[version % 2].named_hf_tensors(), version, recompute_kv=True)
        elif what == "abort" and requests:
            rid = random.Random(number).choice(list(requests))
            if (ended := engine.abort(rid)) is not None:
                done[rid] = ended
        elif what == "step":
            for _ in range(more[0]):
                done |= {one.rid: one for one in engine.step()}
    done |= run(engine)
    assert done.keys() == requests.keys()
    for rid, one in done.items():
        assert_is_of_its_versions(models, requests[rid], one)
