"""Images of a packed micro-batch: which token takes which embedding of the vision tower.

    packed rows with `multi_modal_input` -> read_images -> MicroImages, or None without images

Rows whose pixels are one tensor (the samples of a prompt) share its images: the tower computes them
once. Pixels stay where they are until the micro-batch is computed. What a tower that is not trained
makes of them is kept while they are in memory (`FrozenSights`): the passes of a step look once.

On several ranks a sharded tower runs on all or none: `BaseTrainEngine` gives micro-batches without
images a blank one (`no_images`), whose embedding no token takes.

Shape legend: T tokens of the micro-batch, I image tokens among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from areal.models.common.args import DecoderArgs
from areal.models.vision.args import VisionArgs
from areal.models.vision.positions import image_spans, rotary_positions
from areal.models.vision.tower import Images, Sight
from areal.utils.data import MULTI_MODAL_KEY

_KEYS = ("pixel_values", "image_grid_thw")
_MAX_KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MicroImages:
    shown: tuple[Images, ...]  # each with pixels of its own
    positions_3T: torch.Tensor | None  # None: those of text
    rows_I: torch.Tensor  # the tokens that take an embedding
    source_I: torch.Tensor  # which of the tower's embeddings, in the order of the images
    # Start of its sequence, start and end of each image whose tokens see all of it.
    blocks: tuple[tuple[int, int, int], ...] = ()

    def within(self, start: int, end: int) -> MicroImages:
        """Of the tokens from `start` to `end` alone; all images, as ranks run the tower alike."""
        is_own_I = (self.rows_I >= start) & (self.rows_I < end)
        rows_I, source_I = self.rows_I[is_own_I] - start, self.source_I[is_own_I]
        return replace(self, positions_3T=None, rows_I=rows_I, source_I=source_I)

    def inputs(
        self, sights: FrozenSights | None = None
    ) -> tuple[Images | Sight, torch.Tensor, torch.Tensor]:
        """Arguments of a decoder's forward, on the device of its tokens."""
        device = self.rows_I.device
        seen = _uploaded(self.shown, device) if sights is None else sights.of(self.shown, device)
        return seen, self.rows_I, self.source_I


def _uploaded(shown: Sequence[Images], device: torch.device) -> Images:
    images = Images.concat(shown)
    pixels = images.pixels
    if device.type == "cuda" and not pixels.is_cuda:
        pixels = pixels.pin_memory()  # else the copy waits for all work launched before it
    return Images(pixels.to(device, non_blocking=True), images.grids)


class FrozenSights:
    """What a tower that is not trained made of images, by their pixel tensors, and no longer than
    these exist; up to 1 GiB, the newest. `num_tokens` of a grid."""

    def __init__(
        self, look: Callable[[Images], Sight], num_tokens: Callable[[Sequence[int]], int]
    ) -> None:
        self._look, self._num_tokens = look, num_tokens
        self._known = WeakIdKeyDictionary()  # pixels -> Sight; oldest first

    @torch.no_grad()
    def of(self, shown: Sequence[Images], device: torch.device) -> Sight:
        """The embeddings of all of them, in order."""
        new = [images for images in shown if images.pixels not in self._known]
        if new:
            whole, start = self._look(_uploaded(new, device)), 0
            for images in new:
                end = start + sum(map(self._num_tokens, images.grids.tolist()))
                self._known[images.pixels] = _copied(whole[start:end])
                start = end
        found = Sight.concat([self._known[images.pixels] for images in shown])
        self._make_room()
        return found

    def clear(self) -> None:
        self._known.clear()

    def _make_room(self) -> None:
        sizes = [(pixels, _num_bytes(sight)) for pixels, sight in self._known.items()]
        excess = sum(size for _, size in sizes) - _MAX_KEPT_BYTES
        for pixels, size in sizes:
            if excess <= 0:
                return
            del self._known[pixels]
            excess -= size


def _copied(sight: Sight) -> Sight:
    """A slice would keep all of what it is cut from."""
    return Sight(sight.tokens_ID.clone(), tuple(x_ID.clone() for x_ID in sight.deepstack))


def _num_bytes(sight: Sight) -> int:
    return sum(x_ID.nbytes for x_ID in (sight.tokens_ID, *sight.deepstack))


def no_images(args: VisionArgs, device: torch.device) -> MicroImages:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroImages((Images.blank(args, device),), None, none, none)


def read_images(
    data: dict[str, Any], args: DecoderArgs, device: torch.device
) -> MicroImages | None:
    """Of packed rows; ValueError for images that the model cannot see, or image tokens without."""
    rows = data.get(MULTI_MODAL_KEY)
    if args.vision is None:
        refuse_images(rows, f"this {args.model_type} has no vision tower here")
        return None
    bounds = data["cu_seqlens"].tolist()
    sequences = np.split(data["input_ids"].numpy(force=True), bounds[1:-1])
    given = [_images_of(row) for row in (rows if rows is not None else [{}] * len(sequences))]
    return _join(sequences, given, args.vision, device)


def refuse_images(rows: list[dict[str, Any]] | None, why: str) -> None:
    if any(rows or ()):
        raise ValueError(
            f"{MULTI_MODAL_KEY}: the batch has images, and {why}: train a model that sees them, "
            "or a workflow without images"
        )


def _images_of(row: dict[str, Any]) -> Images | None:
    if not row:
        return None
    missing = [key for key in _KEYS if not isinstance(row.get(key), torch.Tensor)]
    if missing:
        raise ValueError(
            f"{MULTI_MODAL_KEY}: a row has {sorted(row)}, expected the tensors pixel_values and "
            "image_grid_thw (images by reference are read before a batch reaches an engine)"
        )
    return Images(*(row[key] for key in _KEYS))


def _join(
    sequences: list[np.ndarray],
    given: list[Images | None],
    args: VisionArgs,
    device: torch.device,
) -> MicroImages | None:
    distinct: dict[int, tuple[Images, int]] = {}  # by pixel tensor: and its first embedding
    rows, source, positions, blocks = [], [], [], []
    num_tokens = num_embeddings = 0
    for tokens_S, images in zip(sequences, given, strict=True):
        grids = [] if images is None else images.grids.tolist()
        if images is not None and id(images.pixels) not in distinct:
            images.check(args)
            distinct[id(images.pixels)] = (images, num_embeddings)
            num_embeddings += sum(map(args.num_tokens, grids))
        positions.append(rotary_positions(tokens_S, grids, args))
        first = 0 if images is None else distinct[id(images.pixels)][1]
        for start, end in image_spans(tokens_S, grids, args):
            rows.append(np.arange(num_tokens + start, num_tokens + end))
            source.append(np.arange(first, first + end - start))
            first += end - start
            blocks.append((num_tokens, num_tokens + start, num_tokens + end))
        num_tokens += len(tokens_S)
    if not rows:  # none, or tensors of no image
        return None

    def upload(parts: list[np.ndarray], axis: int = 0) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts, axis)).to(device)

    shown = tuple(images for images, _ in distinct.values())
    positions_3T = upload(positions, axis=1) if args.has_axes else None
    seen = tuple(blocks) if args.is_bidirectional else ()
    return MicroImages(shown, positions_3T, upload(rows), upload(source), seen)
