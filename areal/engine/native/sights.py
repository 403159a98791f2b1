"""What the vision tower makes of images, computed on the engine's thread, once for each weights.

    sights = SightCache(device)
    chunk = sights.chunk(span, runner.look)      # with the embeddings of the image tokens in it
    sights.clear()                               # new weights

Images are told apart by the hash of their bytes, so a group, and every turn of a dialogue, looks at
an image once. Each is computed by itself: its bits do not depend on others. Those used longest ago
are dropped beyond a limit of memory, and computed again if they are needed once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from areal.engine.native.kv_cache import Prefix
from areal.engine.native.runner import Chunk
from areal.models.vision.tower import Images, Sight

if TYPE_CHECKING:
    from areal.engine.native.scheduler import Span
    from areal.models.vision.prompt_images import CutImage

_MAX_BYTES = 512 << 20
Look = Callable[[Images], Sight]


class SightCache:
    """Holds no runner: the engine would be part of a cycle, and its memory never be freed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[bytes, Sight] = OrderedDict()
        self._num_bytes = 0
        self.num_looks = 0  # images the tower has computed

    def chunk(self, span: Span, look: Look) -> Chunk:
        """What a runner gets of it. `look` computes images whose pixels are on the device."""
        item, start, end, states = span
        images = item.images
        chunk = Chunk(item.token_slice(start, end), start, item.pages, item.adapter, states)
        if images is None:
            return chunk
        if not isinstance(item, Prefix):  # of the output
            return replace(chunk, positions=np.arange(start, end) + images.delta)
        sights = [
            (self._sight(image, look)[some], first - start)
            for image, some, first in images.seen(start, end)
        ]
        rotary, last = images.positions_3S, images.last_S
        return replace(
            chunk,
            positions=None if rotary is None else rotary[:, start:end],
            sights=sights,
            last_visible=None if last is None else last[start:end],
        )

    def clear(self) -> None:
        self._kept.clear()
        self._num_bytes = 0

    def _sight(self, image: CutImage, look: Look) -> Sight:
        sight = self._kept.get(image.sha256)
        if sight is not None:
            self._kept.move_to_end(image.sha256)
            return sight
        pixels = torch.from_numpy(image.patches.pixels).to(self._device)
        sight = look(Images(pixels, torch.tensor([image.patches.grid])))
        self.num_looks += 1
        self._kept[image.sha256] = sight
        self._num_bytes += _size(sight)
        while self._num_bytes > _MAX_BYTES and len(self._kept) > 1:
            self._num_bytes -= _size(self._kept.popitem(last=False)[1])
        return sight


def _size(sight: Sight) -> int:
    return sum(part.nbytes for part in (sight.tokens_ID, *sight.deepstack))
