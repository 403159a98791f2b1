"""FSDPEngine with image-text models of transformers: parity, ranks, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.train.archon_world import FT_SPEC, PLAIN_SGD, open_engine, train, weights_of
from engine.train.test_archon_vision import changed_rows, image_batch
from gloo_ranks import run_ranks
from tiny import tiny_config
from tiny_vision import tiny_vision_config, write_tiny_vision_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.train_engine import MicroBatchSpec, TrainEngineConfig
from areal.engine.train.fit import check_training
from areal.engine.train.fsdp.engine import FSDPEngine

SIDE = 8  # of an image in pixels, four patches for the tower of _clip_like


def open_fsdp(folder: str | Path, backend: str = "fsdp:d1", **changes: Any) -> FSDPEngine:
    config = TrainEngineConfig(path=str(folder), backend=backend, optimizer=PLAIN_SGD, **changes)
    engine = FSDPEngine(config)
    engine.create_process_group(ModelAllocation.from_str(backend).parallel)
    engine.initialize(FT_SPEC)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))


def work(engine) -> dict[str, Any]:
    found: dict[str, Any] = {"step": train(engine, image_batch())}
    engine.mb_spec = MicroBatchSpec(max_tokens_per_mb=24)
    batch = image_batch(without_images_at=(1, 2, 3, 5))
    batch["multi_modal_input"][2] = {}
    found["cut_step"] = train(engine, batch)  # of two ranks the second has no image
    found["end"] = weights_of(engine)
    return found


def rank_works(folder: str, out: str) -> None:
    found = work(open_fsdp(folder, "fsdp:d2"))
    if dist.get_rank() == 0:
        torch.save(found, out)


def test_one_and_two_ranks_train_as_archon_does(folder, tmp_path):
    expected = work(open_engine(folder, "archon:d1"))
    out = str(tmp_path / "found.pt")
    run_ranks(2, "engine.train.fsdp.test_fsdp_vision:rank_works", folder, out, timeout_s=900)
    for found in (work(open_fsdp(folder)), torch.load(out)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_tower_stays(folder):
    engine = open_fsdp(folder, freeze_vision_tower=True)
    start = weights_of(engine)
    train(engine, image_batch())
    for name, tensor in weights_of(engine).items():
        assert torch.equal(tensor, start[name]) == name.startswith("visual."), name


@pytest.mark.parametrize(
    ("change", "message"),
    [("nan", "not finite"), ("grid", "its images have 9"), ("missing", "its images have 0")],
)
def test_images_that_do_not_fit_are_refused(folder, change, message):
    with pytest.raises(ValueError, match=message):
        open_fsdp(folder).forward_batch(changed_rows(change))


def _clip_like(kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": SIDE // 2,
    }


def write_foreign(folder: Path, family: str) -> Path:
    """A model that areal has none of its own of, or whose images it does not compute."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    if family == "llava":
        own = {
            "text_config": tiny_config("llama"),
            "vision_config": {**_clip_like("clip_vision_model"), "projection_dim": 16},
            "image_token_index": 60,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        }
    else:
        own = {
            "text_config": tiny_config("gemma3_text"),
            "vision_config": _clip_like("siglip_vision_model"),
            "image_token_index": 60,
            "mm_tokens_per_image": 4,
        }
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **own))
    model.save_pretrained(folder)
    return folder


def square_batch() -> dict[str, Any]:
    """One row of text, one with an image of four tokens."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 0], [5, 60, 60, 60, 60, 6, 7, 8]])
    mask = torch.tensor([[True] * 7 + [False], [True] * 8])
    pixels = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": mask.roll(-1, 1) & (ids.roll(-1, 1) < 60),
        "multi_modal_input": [{}, {"pixel_values": pixels}],
    }


def test_a_family_that_areal_has_not_is_trained(tmp_path):
    from transformers import AutoModelForImageTextToText

    write_foreign(tmp_path, "llava")
    batch = square_batch()
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    tokens, images = batch["input_ids"][1], batch["multi_modal_input"][1]
    with torch.no_grad():
        logits = theirs.eval()(input_ids=tokens[None], **images).logits[0]
    expected = logits[4:-1].log_softmax(-1).gather(1, tokens[5:, None]).squeeze(1)
    engine = open_fsdp(tmp_path)
    found = engine.forward_batch(batch)[1, 4:7]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    start = weights_of(engine)
    train(engine, batch)
    end = weights_of(engine)
    moved = {name for name in end if not torch.equal(end[name], start[name])}
    assert any("vision" in name for name in moved) and any("layers.0.mlp" in n for n in moved)


def test_images_that_are_seen_in_both_directions_are_refused(tmp_path):
    engine = open_fsdp(write_foreign(tmp_path, "gemma3"))
    with pytest.raises(ValueError, match="the image tokens of this model see each other"):
        engine.forward_batch(square_batch())


@pytest.mark.parametrize(
    ("changes", "hf_config", "message"),
    [
        (
            {"backend": "fsdp:c2"},
            tiny_vision_config("qwen3_vl"),
            "does not cut a model with images",
        ),
        (
            {"backend": "fsdp:t2"},
            tiny_vision_config("qwen3_vl"),
            "does not cut a model with images",
        ),
        ({"freeze_vision_tower": True}, tiny_config("qwen3"), "has no vision tower"),
    ],
)
def test_what_is_not_computed_is_refused_from_the_config(changes, hf_config, message):
    config = TrainEngineConfig(**{"path": "m", "backend": "fsdp:d1", **changes})
    with pytest.raises(ValueError, match=message):
        check_training(config, hf_config)
