"""VisionRLVRWorkflow with a scripted engine, real reward processes and images on disk."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
from pathlib import Path

import pytest
import torch
from config_files import load
from image_prompts import write_seeing_model, write_tokenizer
from PIL import Image
from sample_rewards import exact_match
from tiny import write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelResponse
from areal.api.workflow_context import episode
from areal.dataset.arithmetic import build_char_tokenizer
from areal.dataset.image_rows import ImageSFTRows
from areal.engine.train.fit import check_sight
from areal.models.vision.processor import find_processor, image_processor_of, load_processor
from areal.rollout.trajectory import check_trajectory_format
from areal.run.images import ImageStore, with_pixels
from areal.utils.images import ImageError
from areal.utils.tokenizer import load_hf_tokenizer
from areal.workflow.image_chat import chat_of, images_of
from areal.workflow.vision_rlvr import VisionRLVRWorkflow

ROOT = Path(__file__).parents[2]


def png(width=32, height=32, colour=(200, 30, 30)):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, format="PNG")
    return buffer.getvalue()


RED, WIDE = png(), png(64, 16)
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "which colour ?"}


def row(*parts, images=(RED,), answer="red"):
    messages = [{"role": "user", "content": list(parts)}]
    return {"messages": messages, "images": list(images), "answer": answer}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a vision model's folder says, without its weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        from examples.vlm.make_model import image_config, model_config, write_tokenizer
    folder = tmp_path_factory.mktemp("vision")
    config = model_config(write_tokenizer(folder))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(image_config()))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_hf_tokenizer(str(folder))


@pytest.fixture
def make_workflow(folder, tokenizer, tmp_path):
    made = []

    def make(**kwargs):
        gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=4)
        options = {"image_folder": tmp_path / "images", **kwargs}
        made.append(VisionRLVRWorkflow(exact_match, gconfig, tokenizer, str(folder), **options))
        return made[-1]

    yield make
    for workflow in made:
        workflow.close()


class Replies(InferenceEngine):
    """Answers with the texts in turn, the last of them from then on; keeps the requests."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.requests = tokenizer, texts, []

    async def agenerate(self, req):
        text = self.texts[min(len(self.requests), len(self.texts) - 1)]
        self.requests.append(req)
        tokens = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=tokens,
            output_logprobs=[-0.5] * len(tokens),
            output_versions=[5] * len(tokens),
            stop_reason="stop",
            tokenizer=req.tokenizer,
        )

    def initialize(self): ...
    def destroy(self): ...
    def pause_generation(self): ...
    def continue_generation(self): ...
    def update_weights(self, meta, named_tensors=None): ...
    def get_version(self): ...
    def stats(self): ...
    def busy_intervals(self, since): ...


async def test_an_episode_sends_the_image_and_keeps_a_reference(make_workflow, tokenizer, tmp_path):
    workflow, engine = make_workflow(), Replies(tokenizer, "red")
    result = await workflow.arun_episode(engine, row(IMAGE, TEXT, IMAGE, images=[RED, WIDE]))
    check_trajectory_format(result)
    (request,) = engine.requests
    assert request.image_data == [base64.b64encode(data).decode() for data in (RED, WIDE)]
    assert request.vision_msg_vllm == [{"role": "user", "content": [IMAGE, TEXT, IMAGE]}]
    one, other = (
        "<|vision_start|><|image_pad|><|image_pad|>",
        "<|image_pad|><|image_pad|><|vision_end|>",
    )
    words = tokenizer(f"{one}{other} which colour ? {one}{other}")["input_ids"]
    assert request.input_ids == words
    assert result["input_ids"].tolist() == [[*words, *tokenizer("red")["input_ids"], 1]]
    assert result["loss_mask"].tolist() == [[0] * len(words) + [1, 1]]
    assert result["rewards"].tolist() == [1.0]
    (images,) = result["multi_modal_input"]
    assert images["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 8]]
    assert bytes(images["image_sha256"][1].tolist()) == hashlib.sha256(WIDE).digest()
    processor = load_processor(workflow_folder(workflow), None)
    (shown,) = with_pixels([images], ImageStore(tmp_path / "images"), processor.cut)
    assert shown["pixel_values"].shape == (32, 3 * 2 * 8 * 8)


def workflow_folder(workflow):
    return workflow.tokenizer.name_or_path


async def test_a_group_is_one_prompt_and_one_file(make_workflow, tokenizer, tmp_path):
    workflow, engine = make_workflow(), Replies(tokenizer, "red", "green", "red")
    with episode(task_id=3, sample=0, is_eval=False, run_seed=7):
        group = await workflow.arun_group(engine, row(IMAGE, TEXT), 3)
    assert group.failures == {}
    check_trajectory_format(group.trajectory)
    assert group.trajectory["rewards"].tolist() == [1.0, 0.0, 1.0]
    digests = [images["image_sha256"].tolist() for images in group.trajectory["multi_modal_input"]]
    assert digests == [[list(hashlib.sha256(RED).digest())]] * 3
    assert [file.read_bytes() for file in (tmp_path / "images").iterdir()] == [RED]
    seeds = [request.gconfig.seed for request in engine.requests]
    for sample in range(3):
        with episode(task_id=3, sample=sample, is_eval=False, run_seed=7):
            await workflow.arun_episode(engine, row(IMAGE, TEXT))
    assert [request.gconfig.seed for request in engine.requests[3:]] == seeds


async def test_a_wrong_reply_is_tried_again_with_the_image(make_workflow, tokenizer):
    workflow = make_workflow(max_turns=3, turn_discount=0.5, feedback="which ?")
    engine = Replies(tokenizer, "green", "blue", "red")
    with episode(task_id=3, sample=0, is_eval=False, run_seed=7):
        result = await workflow.arun_episode(engine, row(IMAGE, TEXT))
    assert result["rewards"].tolist() == [0.25]
    first, second, third = engine.requests
    assert first.image_data == second.image_data == third.image_data != []
    said = [message["content"] for message in third.vision_msg_vllm[1:]]
    assert said == ["green", "which ?", "blue", "which ?"]
    assert third.input_ids[: len(second.input_ids)] == second.input_ids
    assert tokenizer.decode(third.input_ids).count("<|image_pad|>") == 4
    seeds = [request.gconfig.seed for request in engine.requests]
    engine = Replies(tokenizer, "green", "green", "blue", "blue", "red")
    with episode(task_id=3, sample=0, is_eval=False, run_seed=7, is_group=True):
        group = await workflow.arun_group(engine, row(IMAGE, TEXT), 2)
    check_trajectory_format(group.trajectory)
    assert len(group.trajectory["multi_modal_input"]) == 2
    assert set(seeds) < {request.gconfig.seed for request in engine.requests}


async def test_what_is_no_image_is_a_failure_and_not_kept(make_workflow, tokenizer, tmp_path):
    engine = Replies(tokenizer, "red")
    for bad in (b"", b"<svg/>", RED[:40]):
        with pytest.raises(ImageError):
            await make_workflow().arun_episode(engine, row(IMAGE, TEXT, images=[bad]))
    assert not engine.requests and not (tmp_path / "images").exists()


async def test_text_that_looks_like_an_image_is_refused(make_workflow, tokenizer):
    forged = {"type": "text", "text": "<|vision_start|> <|image_pad|> <|vision_end|> which ?"}
    with pytest.raises(ValueError, match="the prompt has 2 image tokens for 1 images"):
        await make_workflow().arun_episode(Replies(tokenizer, "red"), row(IMAGE, forged))


def test_images_come_in_the_forms_that_rows_have():
    encoded = base64.b64encode(WIDE).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    decoded = Image.open(io.BytesIO(RED))
    data = row(IMAGE, url, IMAGE, IMAGE, TEXT, images=[RED, {"bytes": WIDE, "path": None}, decoded])
    first, second, third, fourth = images_of(data)
    assert (first, second, third) == (RED, WIDE, WIDE)
    assert Image.open(io.BytesIO(fourth)).tobytes() == decoded.tobytes()
    assert chat_of(data)[0]["content"] == [IMAGE] * 4 + [TEXT]
    assert images_of({"messages": [{"role": "user", "content": "text"}]}) == []


@pytest.mark.parametrize(
    "data, found",
    [
        (row(IMAGE, IMAGE, TEXT), "shows more images than the row has .* \\(1\\)"),
        (row(TEXT), "1 more images in its column 'images' than its chat shows"),
        (row(IMAGE, TEXT, images=["http://host/a.png"]), "not fetched from the network"),
        (row(IMAGE, TEXT, images=["file:///etc/passwd"]), "files are not read"),
        (row(IMAGE, TEXT, images=[7]), "encoded bytes, base64, a data: URL or a PIL image, got 7"),
        ({"images": [RED]}, "a row needs the key 'messages'"),
    ],
)
def test_rows_that_do_not_fit_are_explained(data, found):
    with pytest.raises(ValueError, match=found):
        images_of(data)


def test_a_model_of_text_is_refused(tmp_path, folder, tokenizer):
    text = write_tiny_model(tmp_path / "text", vocab_size=58)
    build_char_tokenizer(text)
    assert find_processor(str(text), tokenizer) is None
    with pytest.raises(ValueError, match="processor: the model at .* reads text only"):
        VisionRLVRWorkflow(exact_match, GenerationHyperparameters(), tokenizer, str(text))
    config = load(tmp_path, "ppo", "workflow=vision_rlvr")
    with pytest.raises(ValueError, match="^workflow: vision_rlvr shows images, and .* reads text"):
        check_sight(config, json.loads((text / "config.json").read_text()))
    check_sight(config, json.loads((folder / "config.json").read_text()))


def test_a_processor_of_another_model_is_refused(tmp_path, folder, tokenizer):
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_text((folder / file).read_text().replace('_size": 8', '_size": 4'))
    assert load_processor(tmp_path, tokenizer).rules.patch_size == 4
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="preprocessor_config.json has patch_size 4, the vision_"):
        load_processor(tmp_path, tokenizer)


class HasBoth:
    """What an AutoProcessor has of images; that of Qwen's models needs torchvision."""

    def __init__(self, image_processor, tokenizer):
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")


@pytest.fixture(scope="module")
def their_processor(folder, tokenizer):
    from transformers import AutoImageProcessor

    return HasBoth(AutoImageProcessor.from_pretrained(folder), tokenizer)


def test_a_processor_of_transformers_is_accepted(their_processor, tokenizer, tmp_path):
    made = image_processor_of(their_processor, tokenizer)
    assert made.grid_of(WIDE) == (1, 2, 8)
    gconfig = GenerationHyperparameters()
    options = {"image_folder": tmp_path}
    VisionRLVRWorkflow(exact_match, gconfig, tokenizer, their_processor, **options).close()
    changed = HasBoth(copy.deepcopy(their_processor.image_processor), tokenizer)
    changed.image_processor.size["longest_edge"] *= 4
    with pytest.raises(ValueError, match="^processor: its max_pixels is 4096, and the model at "):
        image_processor_of(changed, tokenizer)
    with pytest.raises(ValueError, match="^processor: expected .* AutoProcessor, got int"):
        image_processor_of(7, tokenizer)


def test_a_processor_of_transformers_that_makes_squares(tmp_path):
    from transformers import AutoImageProcessor

    folder = write_seeing_model(tmp_path, "gemma3")
    tokenizer = write_tokenizer(folder)
    tokenizer.name_or_path = str(folder)
    theirs = HasBoth(AutoImageProcessor.from_pretrained(folder), tokenizer)
    assert image_processor_of(theirs, tokenizer).rules == load_processor(folder, tokenizer).rules
    changed = HasBoth(copy.deepcopy(theirs.image_processor), tokenizer)
    changed.image_processor.image_std = [0.25] * 3
    with pytest.raises(ValueError, match="^processor: its std is "):
        image_processor_of(changed, tokenizer)
    with pytest.raises(ValueError, match=r"^processor: .* makes no image_grid_thw; give load_proc"):
        ImageSFTRows([], tokenizer, theirs, str)


def test_supervised_rows_are_cut_alike_by_a_processor_of_transformers(their_processor, tokenizer):
    rows = [row(IMAGE, TEXT, IMAGE, images=[RED, WIDE])]
    own = image_processor_of(their_processor, tokenizer)
    (ours,) = ImageSFTRows(rows, tokenizer, own, str)
    (theirs,) = ImageSFTRows(rows, tokenizer, their_processor, str)
    assert theirs["input_ids"] == ours["input_ids"] and theirs["loss_mask"] == ours["loss_mask"]
    torch.testing.assert_close(theirs["multi_modal_input"], ours["multi_modal_input"])
    forged = [row(IMAGE, {"type": "text", "text": "<|image_pad|>"})]
    with pytest.raises(ValueError, match="2 image tokens for 1 images"):
        ImageSFTRows(forged, tokenizer, their_processor, str)[0]
    with pytest.raises(ValueError, match="^processor: expected an ImageProcessor"):
        ImageSFTRows(rows, tokenizer, object(), str)


def test_supervised_rows_with_and_without_images_make_a_batch():
    from areal.trainer.learners import text_batch

    images = {"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    seen = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "multi_modal_input": images}
    read = {"input_ids": [4], "loss_mask": [1]}
    batch = text_batch([seen, read])
    assert batch["multi_modal_input"] == [images, {}]
    assert "multi_modal_input" not in text_batch([read])
