"""What a model's folder says of images: how they are cut, and the token that stands for them.

    processor = load_processor(folder, tokenizer)
    grid = processor.grid_of(data)                  # patches of an encoded image
    ids = processor.expand(prompt_ids, [grid])      # one image token per merged patch
    pixels, grid = processor.cut(data)              # what the vision tower reads

A chat template writes one image token for each image; `expand` writes as many as the tower makes
embeddings, as transformers' processors do. Images are decoded in a process apart (utils/images.py).
No torch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from areal.models import vision_args
from areal.models.vision.args import VisionArgs
from areal.models.vision.patches import (
    PatchRules,
    cut_patches,
    patch_rules,
    resized_sides,
    rules_for,
    with_sizes_of,
)
from areal.models.vision.placeholders import expand_placeholders
from areal.utils.hub import model_folder
from areal.utils.images import decode_image
from areal.utils.model_files import read_hf_config

Grid = tuple[int, int, int]
_NUM_GRIDS = 4096  # kept; a few bytes each


class ImageProcessor:
    """`tokenizer` is kept for loaders, which take both from one object."""

    def __init__(self, args: VisionArgs, rules: PatchRules, tokenizer: Any) -> None:
        self.args, self.rules, self.tokenizer = args, rules, tokenizer
        self._grids: OrderedDict[bytes, Grid] = OrderedDict()  # by the sha256 of the image

    def grid_of(self, data: bytes) -> Grid:
        """ImageError for what is not an image; remembered, since samples of a group share it."""
        digest = hashlib.sha256(data).digest()
        grid = self._grids.get(digest)
        if grid is None:
            height, width, _ = decode_image(data).rgb.shape
            height, width = resized_sides(height, width, self.rules)
            side = self.rules.patch_size
            grid = self._grids[digest] = 1, height // side, width // side
            if len(self._grids) > _NUM_GRIDS:
                self._grids.popitem(last=False)
        return grid

    def cut(self, data: bytes) -> tuple[np.ndarray, Grid]:
        """Pixels `[P, V]` float32 in the order of the tower, and the grid of the patches."""
        patches = cut_patches(decode_image(data).rgb, self.rules)
        return patches.pixels, patches.grid

    def expand(self, ids: Sequence[int], grids: Sequence[Sequence[int]]) -> list[int]:
        """One image token per merged patch, in place of the one token that a template writes."""
        found = sum(one == self.args.template_token_id for one in ids)
        if found != len(grids):
            raise ValueError(
                f"the prompt has {found} image tokens for {len(grids)} images; the chat template "
                "must write one for each, and no text may contain one"
            )
        return expand_placeholders(ids, grids, self.args, self.tokenizer)


def load_processor(path: str | Path, tokenizer: Any, *, key: str = "processor") -> ImageProcessor:
    """Of a model folder or hub name; ValueError, naming `key`, if that model reads text only."""
    folder = model_folder(str(path), key=key, weights=False)
    args = vision_args(read_hf_config(folder))
    if args is None:
        raise ValueError(
            f"{key}: the model at {str(path)!r} reads text only; expected one with a vision tower"
        )
    return ImageProcessor(args, rules_for(args, folder), tokenizer)


def image_processor_of(given: Any, tokenizer: Any) -> ImageProcessor:
    """Of what a script passes as `processor`: an ImageProcessor, the model's folder or hub name, or
    transformers' AutoProcessor of that folder."""
    if isinstance(given, ImageProcessor):
        return given
    if isinstance(given, str | Path):
        return load_processor(given, tokenizer)
    cutter, its_tokenizer = (
        getattr(given, "image_processor", None),
        getattr(given, "tokenizer", None),
    )
    if cutter is None or its_tokenizer is None:
        raise ValueError(
            "processor: expected the model's folder or hub name, an ImageProcessor of "
            f"areal.models.vision.processor or an AutoProcessor, got {type(given).__name__}"
        )
    path = its_tokenizer.name_or_path
    own = load_processor(path, tokenizer)
    rules = patch_rules(cutter.to_dict())
    _check_same_rules(own.rules, with_sizes_of(own.args, rules) if rules.square else rules, path)
    return own


def _check_same_rules(own: PatchRules, given: PatchRules, path: str) -> None:
    """Engines and trainer cut images by the folder, so an object that was changed is refused."""
    for field in fields(PatchRules):
        found, expected = getattr(given, field.name), getattr(own, field.name)
        if found != expected:
            raise ValueError(
                f"processor: its {field.name} is {found}, and the model at {path!r} has "
                f"{expected}: save the changed processor beside the model, where servers and "
                "trainer read it"
            )


def find_processor(path: str, tokenizer: Any) -> ImageProcessor | None:
    """`load_processor`, or None for a model that reads text only."""
    folder = model_folder(path, weights=False)
    if vision_args(read_hf_config(folder)) is None:
        return None
    return load_processor(path, tokenizer, key="actor.path")
