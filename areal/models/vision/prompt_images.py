"""The images of a prompt, made ready for the engine off its thread: decoded, cut, placed.

    reader = ImageReader(model_folder)
    input_ids, images = reader.read(input_ids, image_data)     # placeholders expanded

Decoding and cutting take milliseconds to seconds, so they happen where a request arrives, and once
for all requests with the same bytes. What the engine's thread gets (`PromptImages`) says which
tokens belong to which image, the rotary positions of the prompt, and under which key its pages can
be found again: an image token stands for its image there, so that prompts which differ only in
their images share nothing behind the first difference.

Shape legend: S tokens of the prompt, P patches, V values of a patch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from areal.models import decoder_args
from areal.models.hf_io import read_hf_config
from areal.models.vision.args import VisionArgs
from areal.models.vision.patches import Patches, PatchRules, cut_patches, rules_for
from areal.models.vision.placeholders import expand_placeholders
from areal.models.vision.positions import (
    image_spans,
    last_visible,
    position_delta,
    rotary_positions,
)
from areal.utils.images import decode_image, image_bytes

_KEPT_BYTES = 256 << 20  # of images that were cut last
MAX_IMAGES = 256  # of one request


@dataclass(frozen=True, slots=True, eq=False)
class CutImage:
    sha256: bytes  # of the encoded bytes
    patches: Patches


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    tokens: tuple[int, ...]  # the prompt's, image tokens as they are
    images: tuple[CutImage, ...]
    spans: tuple[tuple[int, int], ...]  # start and end of each image's tokens
    positions_3S: np.ndarray | None  # rotary positions of the prompt; None: those of text
    delta: int  # rotary position minus index, of what follows the prompt
    key: tuple[int, ...]  # the tokens, those of an image replaced by its hash
    # The last position each token sees, where tokens of an image see all of it; None: its own.
    last_S: np.ndarray | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int], images: Sequence[CutImage], args: VisionArgs
    ) -> PromptImages:
        """ValueError if the image tokens are not those of the images."""
        grids = [image.patches.grid for image in images]
        spans = image_spans(tokens, grids, args)
        positions_3S = rotary_positions(tokens, grids, args)
        key = list(tokens)
        for image, (start, end) in zip(images, spans, strict=True):
            # Negative, hence no token; as long as the hash, hence of one image alone.
            key[start:end] = [~int.from_bytes(image.sha256)] * (end - start)
        return cls(
            tuple(tokens),
            tuple(images),
            tuple(spans),
            positions_3S,
            0 if positions_3S is None else position_delta(positions_3S),
            tuple(key),
            last_visible(len(tokens), spans) if args.is_bidirectional else None,
        )

    def whole_end(self, end: int) -> int:
        """At most `end`, and not within an image whose tokens must be computed together."""
        if self.last_S is None:
            return end
        return next((first for first, last in self.spans if first < end < last), end)

    def seen(self, start: int, end: int) -> list[tuple[CutImage, slice, int]]:
        """Images with tokens in positions `start` to `end`: which of their tokens, and the position
        of the first of these."""
        return [
            (image, slice(max(start - first, 0), min(end, last) - first), max(start, first))
            for image, (first, last) in zip(self.images, self.spans, strict=True)
            if first < end and start < last
        ]


class ImageReader:
    """Thread-safe; blocking, so not for an event loop. The files of the folder are read when the
    first image comes."""

    def __init__(
        self,
        folder: str | Path,
        image_folders: Sequence[str | Path] = (),
        tokenizer: Callable[[], Any] = lambda: None,
    ) -> None:
        """`image_folders`: `file:` URLs below these are read. `tokenizer` is called where a family
        needs one to place images."""
        self._folder, self._tokenizer = Path(folder), tokenizer
        self._image_folders = tuple(image_folders)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, CutImage] = OrderedDict()
        self._kept_bytes = 0

    def read(
        self, input_ids: Sequence[int], image_data: Sequence[str]
    ) -> tuple[list[int], PromptImages]:
        """The prompt with an image token for each merged patch. ValueError names the image."""
        args = self._args
        if len(image_data) > MAX_IMAGES:
            raise ValueError(f"image_data has {len(image_data)} images, at most {MAX_IMAGES}")
        images = [self._image(number, source) for number, source in enumerate(image_data)]
        grids = [one.patches.grid for one in images]
        needs_text = args.starts_images and args.image_token_id not in input_ids
        tokenizer = self._tokenizer() if needs_text else None
        tokens = expand_placeholders(input_ids, grids, args, tokenizer)
        return tokens, PromptImages.of(tokens, images, args)

    def _image(self, number: int, source: str) -> CutImage:
        try:
            return self._cut(image_bytes(source, self._image_folders))
        except ValueError as error:
            raise ValueError(f"image_data[{number}]: {error}") from error

    def _cut(self, data: bytes) -> CutImage:
        with self._lock:
            kept = self._kept.get(data)
            if kept is not None:
                self._kept.move_to_end(data)
                return kept
        decoded = decode_image(data)
        cut = CutImage(decoded.sha256, cut_patches(decoded.rgb, self._rules))
        with self._lock:
            if data not in self._kept:
                self._kept[data] = cut
                self._kept_bytes += _size(data, cut)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= _size(*self._kept.popitem(last=False))
        return cut

    @cached_property
    def _args(self) -> VisionArgs:
        args = decoder_args(read_hf_config(self._folder)).vision
        if args is None:
            raise ValueError("image_data: this model has no vision tower; remove the images")
        return args

    @cached_property
    def _rules(self) -> PatchRules:
        return rules_for(self._args, self._folder)


def _size(data: bytes, cut: CutImage) -> int:
    return len(data) + cut.patches.pixels.nbytes
