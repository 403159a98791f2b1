"""Patches of an image: those of transformers' image processor."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import ImageRow, tiny_vision_config
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from areal.models import decoder_args
from areal.models.vision.patches import (
    PatchRules,
    cut_patches,
    read_patch_rules,
    resized_sides,
    rules_for,
)
from areal.utils.images import ImageError

OPTIONS = [
    {},
    {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "min_pixels": 64,
        "max_pixels": 4096,
    },
]


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sides", [(28, 28), (3, 5), (100, 31), (57, 640), (1200, 1100), (13, 200)])
def test_they_are_those_of_transformers(tmp_path, options, sides):
    processor = Qwen2VLImageProcessorPil(**options)
    processor.save_pretrained(tmp_path)
    rules = read_patch_rules(tmp_path)
    rgb = picture(*sides)
    expected = processor(images=[Image.fromarray(rgb)], return_tensors="np")
    found = cut_patches(rgb, rules)
    assert [list(found.grid)] == expected["image_grid_thw"].tolist()
    assert found.pixels.dtype == np.float32
    np.testing.assert_allclose(found.pixels, expected["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("sides", [(28, 28), (3, 5), (57, 640)])
def test_squares_are_those_of_transformers(tmp_path, sides):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    processor.save_pretrained(tmp_path)
    config = tiny_vision_config("gemma3")
    rules = rules_for(decoder_args(config).vision, tmp_path)
    rgb = picture(*sides)
    expected = processor(images=[Image.fromarray(rgb)], return_tensors="pt")["pixel_values"]
    found = cut_patches(rgb, rules)
    assert found.grid == (1, 6, 6)
    row = ImageRow(None, torch.from_numpy(found.pixels), torch.tensor([found.grid]))
    torch.testing.assert_close(row.pictures(patch_size=4), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan must be false"),
        ({"size": {"height": 24, "width": 28}}, "equal sides"),
        ({"size": {"height": 28, "width": 28}}, "resizes images to 28 pixels"),
        ({"size": {"height": "24", "width": "24"}}, "square must be a number above 0"),
        ({"size": 24}, "size must be an object"),
        ({"resample": 0}, "resample must be a number above 0"),
        ({"rescale_factor": 0}, "rescale_factor must be a number above 0"),
    ],
)
def test_squares_that_are_not_cut_here_are_refused(tmp_path, change, message):
    rules = {"image_processor_type": "Gemma3ImageProcessorFast"} | change
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules))
    with pytest.raises(ValueError, match=message):
        rules_for(decoder_args(tiny_vision_config("gemma3")).vision, tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_rules_of_a_folder(tmp_path, nested):
    given = {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": given} if nested else given))
    assert read_patch_rules(tmp_path) == PatchRules(
        patch_size=16, min_pixels=1024, max_pixels=65536
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type must be"),
        ({"patch_size": 0}, "patch_size must be"),
        ({"merge_size": True}, "merge_size must be"),
        ({"max_pixels": "many"}, "max_pixels must be"),
        ({"image_std": [1, 2]}, "image_std must be three numbers"),
        ({"image_std": [1, 0, 1]}, "image_std must be three numbers other than 0"),
        ({"size": [224, 224]}, "size must be an object"),
        ({"resample": 77}, "resample must be a filter of PIL, got 77"),
        ({"do_normalize": False}, "do_normalize must be true"),
    ],
)
def test_rules_that_are_not_computed_are_refused(tmp_path, content, says):
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{file}: {says}"):
        read_patch_rules(tmp_path)


def test_a_folder_without_rules_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no preprocessor_config.json"):
        read_patch_rules(tmp_path)


def test_rules_of_another_model_are_refused(tmp_path):
    args = decoder_args(tiny_vision_config()).vision_args
    content = {"patch_size": args.patch_size + 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"has patch_size {args.patch_size + 1}, the vision_conf"):
        rules_for(args, tmp_path)


def test_a_strip_is_refused():
    with pytest.raises(ImageError, match="200 times"):
        resized_sides(1, 201, PatchRules())
