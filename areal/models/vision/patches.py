"""Decoded images cut to patches, as the image processor of the model's folder does it.

    rules = read_patch_rules(folder)            # its preprocessor_config.json
    patches = cut_patches(image.rgb, rules)     # patches.pixels [P, V] float32, patches.grid

An image is resized so that its sides are multiples of a merged patch and its area lies within the
folder's limits, then rescaled, normalised, and cut. Patches lie in merge order: the `merge_size` x
`merge_size` of them that become one token of the decoder are neighbours. No torch.

Shape legend: H, W sides in pixels, P patches, C channels, V = C * temporal * patch * patch values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from areal.api.json_text import loads_object
from areal.models.vision.args import VisionArgs
from areal.utils.images import ImageError

_FILES = ("preprocessor_config.json", "processor_config.json")
# Fast and Pil are suffixes.
_FAMILY = "Qwen2VLImageProcessor"  # of Qwen2-VL, Qwen2.5-VL and Qwen3-VL
_SQUARE_FAMILY = "Gemma3ImageProcessor"
_MAX_RATIO = 200  # of the sides
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_OF_PIXELS = ("resample", "rescale_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRules:
    """The keys of a preprocessor_config.json; transformers' defaults where it is silent."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    resample: int = Image.Resampling.BICUBIC
    rescale_factor: float = 1 / 255
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD
    square: int = 0  # pixels of a side that every image is resized to; 0: sizes of their own

    @property
    def factor(self) -> int:
        """Pixels of a merged patch's side."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    pixels: np.ndarray  # float32 [P, V]
    grid: tuple[int, int, int]  # patches in time (1), height and width


def read_patch_rules(folder: str | Path) -> PatchRules:
    """ValueError, naming file and key, for what is missing or not computed here."""
    for name in _FILES:
        file = Path(folder) / name
        try:
            content = loads_object(file.read_bytes(), name)
        except FileNotFoundError:
            continue
        given = content.get("image_processor", content)
        try:
            return patch_rules(given)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}: {error}") from None
    raise ValueError(
        f"{folder} has no {_FILES[0]}, which says how images are cut: copy it from the folder the "
        "model was published in"
    )


def rules_for(args: VisionArgs, folder: str | Path) -> PatchRules:
    """`read_patch_rules`; ValueError where they cut what the tower does not take."""
    rules = read_patch_rules(folder)
    if rules.square:
        expected = args.image_side * args.patch_size
        if rules.square != expected:
            raise ValueError(
                f"{folder}: {_FILES[0]} resizes images to {rules.square} pixels, the tower of "
                f"config.json takes {expected}; take both from one model"
            )
        return with_sizes_of(args, rules)
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        found, expected = getattr(rules, name), getattr(args, name)
        if found != expected:
            raise ValueError(
                f"{folder}: {_FILES[0]} has {name} {found}, the vision_config of config.json "
                f"{expected}; take both from one model"
            )
    return rules


def with_sizes_of(args: VisionArgs, rules: PatchRules) -> PatchRules:
    """Of a processor that makes squares, which does not say how the tower cuts them."""
    sizes = {"temporal_patch_size": 1, "merge_size": args.merge_size}
    return replace(rules, patch_size=args.patch_size, **sizes)


def patch_rules(given: Mapping[str, Any]) -> PatchRules:
    """From the keys of an image processor; ValueError for what is not computed here."""
    kind = given.get("image_processor_type", _FAMILY)
    family = str(kind).removesuffix("Fast").removesuffix("Pil")
    if family not in (_FAMILY, _SQUARE_FAMILY):
        raise ValueError(
            f"image_processor_type must be {_FAMILY} or {_SQUARE_FAMILY}, got {kind!r:.60}"
        )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if given.get(name, True) is not True:
            raise ValueError(f"{name} must be true, got {given[name]!r:.60}")
    if family == _SQUARE_FAMILY:
        return _square_rules(given)
    size = _size(given, {})
    limits = {
        "min_pixels": given.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": given.get("max_pixels") or size.get("longest_edge"),
    }
    names = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "merge_size",
        "resample": "resample",
        "rescale_factor": "rescale_factor",
    }
    found = {ours: given.get(theirs) for ours, theirs in names.items()} | limits
    rules = {name: value for name, value in found.items() if value is not None}
    return _checked(rules, given)


def _square_rules(given: Mapping[str, Any]) -> PatchRules:
    """Of Gemma 3: one size for all images."""
    if given.get("do_pan_and_scan"):
        raise ValueError(
            f"do_pan_and_scan must be false, got {given['do_pan_and_scan']!r:.60}: an image is not "
            "cut into several"
        )
    size = _size(given, {"height": 224, "width": 224})
    height, width = size.get("height"), size.get("width")
    if height != width:
        raise ValueError(f"size must have equal sides, got {size!r:.60}")
    usual = {
        "resample": int(Image.Resampling.BILINEAR),
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    found = usual | {key: value for key, value in given.items() if value is not None}
    return _checked({"square": height, **{k: found[k] for k in _OF_PIXELS}}, found)


def _size(given: Mapping[str, Any], usual: dict[str, int]) -> dict[str, Any]:
    size = given.get("size") or usual
    if not isinstance(size, dict):
        raise ValueError(f"size must be an object with the names of sides, got {size!r:.60}")
    return size


def _checked(rules: dict[str, Any], given: Mapping[str, Any]) -> PatchRules:
    for name, value in rules.items():
        if not _is_positive(value, float if name == "rescale_factor" else int):
            raise ValueError(f"{name} must be a number above 0, got {value!r:.60}")
    if rules.get("resample", Image.Resampling.BICUBIC) not in set(Image.Resampling):
        raise ValueError(f"resample must be a filter of PIL, got {rules['resample']}")
    for ours, theirs in (("mean", "image_mean"), ("std", "image_std")):
        if (value := given.get(theirs)) is not None:
            rules[ours] = _channels(theirs, value)
    if not all(rules.get("std", _CLIP_STD)):
        raise ValueError(f"image_std must be three numbers other than 0, got {given['image_std']}")
    return PatchRules(**rules)


def _is_positive(value: Any, kind: type) -> bool:
    allowed = (int, float) if kind is float else int
    return isinstance(value, allowed) and not isinstance(value, bool) and 0 < value < math.inf


def _channels(name: str, value: Any) -> tuple[float, ...]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(isinstance(number, int | float) and math.isfinite(number) for number in value)
    ):
        raise ValueError(f"{name} must be three numbers, got {value!r:.60}")
    return tuple(value)


def resized_sides(height: int, width: int, rules: PatchRules) -> tuple[int, int]:
    """Multiples of a merged patch near the sides, with an area within the limits; or the square
    that all images become."""
    if rules.square:
        return rules.square, rules.square
    if max(height, width) > _MAX_RATIO * min(height, width):
        raise ImageError(
            f"the image is {width} x {height} pixels: expected sides within {_MAX_RATIO} times "
            "each other"
        )
    factor = rules.factor
    rounded = [round(side / factor) * factor for side in (height, width)]
    area = rounded[0] * rounded[1]
    if area > rules.max_pixels:
        shrink = math.sqrt(height * width / rules.max_pixels)
        rounded = [
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        ]
    elif area < rules.min_pixels:
        grow = math.sqrt(rules.min_pixels / (height * width))
        rounded = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return rounded[0], rounded[1]


def cut_patches(rgb_HWC: np.ndarray, rules: PatchRules) -> Patches:
    height, width = resized_sides(rgb_HWC.shape[0], rgb_HWC.shape[1], rules)
    resized = Image.fromarray(rgb_HWC).resize((width, height), Image.Resampling(rules.resample))
    scaled_HWC = np.asarray(resized).astype(np.float32) * np.float32(rules.rescale_factor)
    mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
    normal_HWC = (scaled_HWC - mean) / std
    side, merge = rules.patch_size, rules.merge_size
    rows, columns = height // side, width // side
    blocks = normal_HWC.reshape(rows // merge, merge, side, columns // merge, merge, side, -1)
    # To [row of blocks, column of blocks, row in it, column in it, C, side, side].
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    copies = np.repeat(ordered[:, :, :, :, :, None], rules.temporal_patch_size, axis=5)
    pixels = np.ascontiguousarray(copies).reshape(rows * columns, -1)
    return Patches(pixels, (1, rows, columns))
