"""Images of a run by reference: one file each, verified, and pixels when a batch is trained on."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest
import torch

from areal.api.image_references import ShownImage, references
from areal.rollout.trajectory import decode, encode
from areal.run.images import ImageStore, with_pixels
from areal.utils.fs import is_leftover


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "images")


def cut(data):
    """As many patches of 2 values as the image has bytes."""
    pixels = np.frombuffer(data, np.uint8).astype(np.float32).repeat(2).reshape(-1, 2)
    return pixels, (1, 1, len(data))


def test_equal_bytes_are_one_private_file_named_by_their_hash(store):
    digest = store.add(b"picture")
    assert store.add(b"picture") == digest == hashlib.sha256(b"picture").digest()
    (file,) = store.folder.iterdir()
    assert file.name == digest.hex() and file.read_bytes() == b"picture"
    assert file.stat().st_mode & 0o077 == 0
    assert store.read(digest) == b"picture"


def test_many_writers_of_one_image_leave_one_whole_file(store):
    data = bytes(range(256)) * 512
    threads = [threading.Thread(target=store.add, args=(data,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    (file,) = store.folder.iterdir()
    assert not is_leftover(file) and file.read_bytes() == data


@pytest.mark.parametrize("left", [b"", b"pict", b"pixture", b"picture and more"])
def test_a_damaged_file_is_named_and_never_read_as_the_image(store, left):
    digest = store.add(b"picture")
    (store.folder / digest.hex()).write_bytes(left)
    with pytest.raises(RuntimeError, match=f"{digest.hex()} is damaged: its {len(left)} bytes"):
        store.read(digest)


def test_adding_an_image_again_replaces_half_of_it(store):
    digest = store.add(b"picture")
    (store.folder / digest.hex()).write_bytes(b"pic")
    store.add(b"picture")
    assert store.read(digest) == b"picture"


def test_a_missing_file_is_named(store):
    digest = hashlib.sha256(b"nobody wrote this").digest()
    with pytest.raises(RuntimeError, match=f"{digest.hex()}: No such file.*restore the folder"):
        store.read(digest)


def test_a_trajectory_keeps_references_and_its_rows_get_pixels(store):
    digests = [store.add(b"ab"), store.add(b"xyz")]
    grids = [(1, 1, 2), (1, 1, 3)]
    row = references([ShownImage(*pair) for pair in zip(digests, grids, strict=True)])
    trajectory = {
        "input_ids": torch.zeros(3, 4, dtype=torch.int32),
        "attention_mask": torch.ones(3, 4, dtype=torch.bool),
        "multi_modal_input": [row, references([]), row],
    }
    kept = decode(encode(trajectory))["multi_modal_input"]
    first, without, again = with_pixels(kept, store, cut)
    assert without == {}
    assert first["pixel_values"].tolist() == [[float(b)] * 2 for b in b"abxyz"]
    assert first["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 3]]
    assert again["pixel_values"].data_ptr() == first["pixel_values"].data_ptr()


def test_pixels_of_a_workflow_are_left_as_they_are(store):
    row = {"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    (same,) = with_pixels([row], store, cut)
    assert same["pixel_values"] is row["pixel_values"]


def test_an_image_that_is_cut_otherwise_now_is_refused(store):
    row = references([ShownImage(store.add(b"ab"), (1, 2, 2))])
    with pytest.raises(ValueError, match=r"as \(1, 2, 2\) patches and is cut to \(1, 1, 2\) now"):
        with_pixels([row], store, cut)


@pytest.mark.parametrize(
    "row",
    [
        {"image_sha256": torch.zeros(1, 32, dtype=torch.uint8)},
        {"image_sha256": torch.zeros(1, 32), "image_grid_thw": torch.ones(1, 3)},
        {"image_sha256": torch.zeros(1, 8, dtype=torch.uint8), "image_grid_thw": torch.ones(1, 3)},
        {"image_sha256": torch.zeros(2, 32, dtype=torch.uint8), "image_grid_thw": torch.ones(1, 3)},
    ],
)
def test_malformed_references_are_refused(store, row):
    with pytest.raises(ValueError, match="multi_modal_input: expected image_sha256 uint8"):
        with_pixels([row], store, cut)
