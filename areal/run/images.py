"""The images of a run, kept once each under the hash of their bytes.

    store = ImageStore(paths.images)          # RUN/images/<sha256 in hex>, the encoded bytes
    digest = store.add(data)                  # before a trajectory that shows the image is stored
    data = store.read(digest)                 # verified

A trajectory says which images it shows by `image_sha256` (uint8 `[N, 32]`) beside `image_grid_thw`
(int64 `[N, 3]`), so run.db holds no pixels. `with_pixels` puts them in when a batch is trained on.
Invariant: bytes that are read hash to the name they were asked by. A file that is missing or
damaged is an error that names it, never an image left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from areal.api.image_references import DIGEST_BYTES, DIGEST_KEY, GRID_KEY, MULTI_MODAL_KEY
from areal.utils.fs import atomic_write_bytes

PIXELS_KEY = "pixel_values"

# Encoded bytes -> pixels [P, V] float32, and the grid (time, height, width) of their patches.
Cut = Callable[[bytes], tuple[np.ndarray, Sequence[int]]]


class ImageStore:
    """Safe for several processes: a file appears whole, and equal names have equal contents."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def add(self, data: bytes) -> bytes:
        """The sha256 of `data`, which is on disk when this returns."""
        digest = hashlib.sha256(data).digest()
        path = self._path(digest)
        # One of another size was damaged after it was written; the right bytes are at hand.
        if not path.is_file() or path.stat().st_size != len(data):
            atomic_write_bytes(path, data)
        return digest

    def read(self, digest: bytes) -> bytes:
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RuntimeError(
                f"{path}: {error.strerror}, but a trajectory of this run shows that image; restore "
                "the folder images/ of the run, or begin anew with another trial_name"
            ) from None
        found = hashlib.sha256(data).hexdigest()
        if found != path.name:
            raise RuntimeError(
                f"{path} is damaged: its {len(data)} bytes have sha256 {found}, expected that of "
                "its name; restore the file, or begin anew with another trial_name"
            )
        return data

    def _path(self, digest: bytes) -> Path:
        assert len(digest) == DIGEST_BYTES, digest
        return self.folder / digest.hex()


def with_pixels(
    rows: Sequence[Mapping[str, torch.Tensor]], store: ImageStore, cut: Cut
) -> list[dict[str, torch.Tensor]]:
    """The rows of `multi_modal_input` with `pixel_values` in place of references.

    Rows that show the same images share one tensor: a group has one copy of its image. Rows with
    pixels of their own are left as they are.
    """
    made: dict[bytes, torch.Tensor] = {}  # by all digests of a row
    return [_with_pixels(row, store, cut, made) for row in rows]


def _with_pixels(
    row: Mapping[str, torch.Tensor], store: ImageStore, cut: Cut, made: dict[bytes, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if DIGEST_KEY not in row:
        return dict(row)
    digests, grids = _checked(row)
    key = b"".join(digests)
    if key not in made:
        parts = [_pixels(*pair, store, cut) for pair in zip(digests, grids, strict=True)]
        made[key] = torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0])
    return {PIXELS_KEY: made[key], GRID_KEY: row[GRID_KEY].long()}


def _checked(row: Mapping[str, torch.Tensor]) -> tuple[list[bytes], list[list[int]]]:
    digests, grids = row[DIGEST_KEY], row.get(GRID_KEY)
    count = len(digests)
    if (
        digests.dtype != torch.uint8
        or digests.shape != (count, DIGEST_BYTES)
        or grids is None
        or grids.shape != (count, 3)
    ):
        raise ValueError(
            f"{MULTI_MODAL_KEY}: expected {DIGEST_KEY} uint8 [N, {DIGEST_BYTES}] and {GRID_KEY} "
            f"[N, 3], got {digests.dtype} {list(digests.shape)} and "
            f"{None if grids is None else list(grids.shape)}"
        )
    return [bytes(digest.tolist()) for digest in digests], grids.tolist()


def _pixels(digest: bytes, grid: Sequence[int], store: ImageStore, cut: Cut) -> np.ndarray:
    pixels, found = cut(store.read(digest))
    if tuple(found) != tuple(grid):
        raise ValueError(
            f"image {digest.hex()} was shown to the model as {tuple(grid)} patches and is cut to "
            f"{tuple(found)} now: the preprocessor_config.json of the model has changed; restore "
            "it, or begin anew with another trial_name"
        )
    return pixels
