"""Images in the engine and in the trainer on CUDA: they agree, compiled or not, bit for bit where
numerics are batch-invariant."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from engine.train.archon_world import open_engine, train
from tiny_vision import IMAGE, START, tiny_vision_config

from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.train_engine import ArchonEngineConfig
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest
from areal.models.common.decoder import Decoder
from areal.models.hf_io import build_model, load_hf, save_hf
from areal.models.vision.args import VisionArgs
from areal.models.vision.patches import Patches
from areal.models.vision.prompt_images import CutImage, PromptImages

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB = 3000
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 600,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.06,
}
_TOWER = {
    "depth": 4,
    "hidden_size": 160,  # heads of 80, as published ones have
    "intermediate_size": 300,
    "num_heads": 2,
    "out_hidden_size": 256,
}
SECTIONS = {"qwen2_5_vl": [8, 12, 12], "qwen3_vl": [12, 10, 10]}
# Height and width in patches; windows of the first cut them into pieces of several sizes.
IMAGES = [(4, 4), (14, 10), (14, 10), (6, 22), (32, 32)]


def vision_config(family: str) -> dict[str, Any]:
    if family == "gemma3":
        return square_config()
    config = tiny_vision_config(family, **_TOWER)
    rope = {**config["text_config"]["rope_parameters"], "mrope_section": SECTIONS[family]}
    text = {**config["text_config"], **_TEXT, "rope_parameters": rope}
    return {**config, "text_config": text}


def square_config() -> dict[str, Any]:
    """Gemma 3: tokens see all of their image, more of it than a window has."""
    tower = {"hidden_size": 144, "num_attention_heads": 2, "num_hidden_layers": 4}  # heads of 72
    config = tiny_vision_config("gemma3", **tower, image_size=64)
    windows = {"sliding_window": 50, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
    text = {**config["text_config"], **_TEXT, **windows}
    return {**config, "text_config": text, "mm_tokens_per_image": 64}


@pytest.fixture(scope="module", params=[*SECTIONS, "gemma3"])
def folder(request, tmp_path_factory) -> str:
    """With weights that bfloat16 holds exactly."""
    config = vision_config(request.param)
    model = build_model(config, device="cpu", dtype=torch.float32)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp(request.param)
    save_hf(model.bfloat16().named_hf_tensors(), config, path)
    return str(path)


def load(folder: str, dtype: torch.dtype) -> Decoder:
    model = build_model(folder, device=DEVICE, dtype=dtype)
    load_hf(model, folder)
    return model


def requests_of(args: VisionArgs) -> list[GenRequest]:
    """One to three images and text around them, four samples each; and text alone."""
    rng = random.Random(0)
    generator = np.random.default_rng(0)
    sizes = [(args.image_side,) * 2] * len(IMAGES) if args.image_side else IMAGES
    images = [
        CutImage(
            hashlib.sha256(b"%d" % number).digest(),
            Patches(
                generator.normal(size=(height * width, args.patch_values)).astype(np.float32),
                (1, height, width),
            ),
        )
        for number, (height, width) in enumerate(sizes)
    ]
    shown = [[0], [1], [2], [3, 0], [4], [1, 2, 0], []]
    requests = []
    for number, some in enumerate(shown):
        tokens = [rng.randrange(100, VOCAB) for _ in range(rng.randrange(1, 40))]
        for one in some:
            count = args.num_tokens(images[one].patches.grid)
            tokens += [START, *[IMAGE] * count, rng.randrange(100, VOCAB)]
        cut = PromptImages.of(tokens, [images[one] for one in some], args) if some else None
        for sample in range(4):
            options = GenerationHyperparameters(
                seed=sample, max_new_tokens=rng.randrange(1, 60), ignore_eos=True
            )
            requests.append(GenRequest(f"{number}-{sample}", tokens, options, images=cut))
    return requests


def run(engine: NativeEngine, requests: list[GenRequest]) -> dict[str, Finished]:
    for request in requests:
        engine.add(request)
    done: dict[str, Finished] = {}
    while engine.has_work:
        done |= {finished.rid: finished for finished in engine.step()}
    return done


def batch_of(requests: list[GenRequest], done: dict[str, Finished]) -> dict[str, Any]:
    rows = [request.input_ids + done[request.rid].output_tokens for request in requests]
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int32)
    learned = torch.zeros_like(mask)
    for number, (row, request) in enumerate(zip(rows, requests, strict=True)):
        ids[number, : len(row)] = torch.tensor(row)
        learned[number, len(request.input_ids) - 1 : len(row) - 1] = True
    pixels: dict[int, dict[str, torch.Tensor]] = {}
    for request in requests:
        if request.images is not None and id(request.images) not in pixels:
            cut = [image.patches for image in request.images.images]
            pixels[id(request.images)] = {
                "pixel_values": torch.from_numpy(np.concatenate([one.pixels for one in cut])),
                "image_grid_thw": torch.tensor([one.grid for one in cut]),
            }
    images = [pixels.get(id(request.images), {}) for request in requests]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": learned,
        "multi_modal_input": images,
    }


def engine_logprobs(requests: list[GenRequest], done: dict[str, Finished]) -> torch.Tensor:
    return torch.tensor([x for r in requests for x in done[r.rid].output_logprobs])


def trainer_logprobs(folder: str, batch: dict[str, Any], **options: Any) -> torch.Tensor:
    engine = open_engine(folder, "archon:d1", **options)
    found = engine.forward_batch(batch).cpu()[batch["loss_mask"]]
    engine.destroy()
    return found


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().mean().item()


def test_engine_and_trainer_agree_as_far_as_rounding_lets_them(folder):
    model = load(folder, torch.bfloat16)
    requests = requests_of(model.args.vision_args)
    engine = NativeEngine(model, num_pages=3000, max_running=64)
    done = run(engine, requests)
    assert engine.stats()["images_seen"] == len(IMAGES)
    batch, found = batch_of(requests, done), engine_logprobs(requests, done)
    rounded = trainer_logprobs(folder, batch, dtype="bfloat16")
    exact = trainer_logprobs(folder, batch, dtype="float32")
    assert gap(found, exact) < 1.5 * gap(rounded, exact) + 1e-3
    compiled = ArchonEngineConfig(enable_compile=True)
    open_compiled = trainer_logprobs(folder, batch, dtype="bfloat16", archon=compiled)
    assert gap(open_compiled, exact) < 1.5 * gap(rounded, exact) + 1e-3


def test_batch_invariant_logprobs_are_the_trainers_bits(folder):
    model = load(folder, torch.bfloat16)
    requests = requests_of(model.args.vision_args)
    if model.args.vision_args.is_bidirectional:
        with pytest.raises(ValueError, match="batch_invariant"):
            NativeEngine(model, num_pages=3000, max_running=64, batch_invariant=True)
        return
    engine = NativeEngine(model, num_pages=3000, max_running=64, batch_invariant=True)
    done = run(engine, requests)
    batch = batch_of(requests, done)
    wanted = trainer_logprobs(folder, batch, dtype="bfloat16", batch_invariant=True)
    assert torch.equal(engine_logprobs(requests, done), wanted)


def test_a_compiled_step_has_the_gradients_of_a_plain_one(folder):
    requests = requests_of(load(folder, torch.bfloat16).args.vision_args)
    rng = random.Random(1)
    done = {
        request.rid: Finished(
            request.rid, [rng.randrange(100, VOCAB) for _ in range(20)], [], [], "length"
        )
        for request in requests
    }
    batch = batch_of(requests, done)
    norms = {}
    for name, dtype, compiled in (
        ("exact", "float32", False),
        ("plain", "bfloat16", False),
        ("compiled", "bfloat16", True),
    ):
        archon = ArchonEngineConfig(enable_compile=compiled)
        engine = open_engine(folder, "archon:d1", dtype=dtype, archon=archon)
        norms[name] = train(engine, batch)["grad_norm"]
        engine.destroy()
    assert norms["plain"] == pytest.approx(norms["exact"], rel=0.05)
    assert norms["compiled"] == pytest.approx(norms["exact"], rel=0.05)
