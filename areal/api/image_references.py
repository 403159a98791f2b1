"""Images of a trajectory by reference: the sha256 of their encoded bytes, and their patches.

A sequence names its images here, in the order of its tokens; the bytes lie in the run's image store
(run/images.py). torch is imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MULTI_MODAL_KEY = "multi_modal_input"  # one dict of image tensors per row, {} for a row without
DIGEST_KEY, GRID_KEY = "image_sha256", "image_grid_thw"
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class ShownImage:
    sha256: bytes  # of the encoded bytes
    grid: tuple[int, int, int]  # patches in time, height and width


def references(images: Sequence[ShownImage]) -> dict[str, torch.Tensor]:
    """One row of `multi_modal_input`: uint8 `[N, 32]` and int64 `[N, 3]`; {} without images."""
    import torch

    if not images:
        return {}
    digests = [list(image.sha256) for image in images]
    return {
        DIGEST_KEY: torch.tensor(digests, dtype=torch.uint8),
        GRID_KEY: torch.tensor([image.grid for image in images], dtype=torch.int64),
    }
