"""A publication round-trips exactly, and no damage to any of its bytes gets past the reader."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.utils.manifest import CHUNK_BYTES, seal
from areal.weight_sync.publication import PublicationError, open_publication, publish

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(24, dtype=torch.float32).view(6, 4),
    "model.norm.weight": torch.randn(4).to(torch.bfloat16),
    "scale": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "transposed": torch.randn(3, 5).t(),
}


def read(folder):
    return {name: tensor.clone() for name, tensor in open_publication(folder)}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("bucket_bytes", [1, 50, 1 << 30])
def test_round_trip(tmp_path, bucket_bytes):
    manifest = publish(WEIGHTS.items(), tmp_path / "v7", 7, bucket_bytes=bucket_bytes)
    publication = open_publication(tmp_path / "v7")
    assert publication.version == 7
    assert publication.manifest == manifest
    assert_same(read(tmp_path / "v7"), WEIGHTS)
    assert {1: 6, 50: 3, 1 << 30: 1}[bucket_bytes] == len(manifest.buckets)


def test_buckets_are_ordinary_safetensors(tmp_path):
    publish(WEIGHTS.items(), tmp_path / "v", 1)
    loaded = safetensors.torch.load_file(tmp_path / "v" / "bucket_00000.safetensors")
    assert_same({name: loaded[name] for name in WEIGHTS}, WEIGHTS)


def test_views_of_one_storage(tmp_path):
    fused = torch.randn(6, 4)
    parts = {"q": fused[:2], "k": fused[2:4], "again": fused[2:4]}
    publish(parts.items(), tmp_path / "v", 1)
    assert_same(read(tmp_path / "v"), parts)


def test_publishing_again_replaces(tmp_path):
    publish([("a", torch.zeros(9)), ("b", torch.zeros(9))], tmp_path / "v", 1, bucket_bytes=1)
    publish([("a", torch.ones(2))], tmp_path / "v", 2, bucket_bytes=1)
    assert_same(read(tmp_path / "v"), {"a": torch.ones(2)})
    assert sorted(os.listdir(tmp_path / "v")) == ["bucket_00000.safetensors", "manifest.json"]


def test_failing_source_publishes_nothing(tmp_path):
    def weights():
        yield "a", torch.zeros(3)
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        publish(weights(), tmp_path / "v", 1, bucket_bytes=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_weight_given_twice(tmp_path, bucket_bytes):
    twice = [("a", torch.zeros(3)), ("a", torch.ones(3))]
    with pytest.raises(ValueError, match="a was given twice"):
        publish(twice, tmp_path / "v", 1, bucket_bytes=bucket_bytes)


def test_dtype_that_cannot_travel(tmp_path):
    with pytest.raises(ValueError, match="phase is torch.complex64"):
        publish([("phase", torch.zeros(1, dtype=torch.complex64))], tmp_path / "v", 1)


def test_tensors_stay_valid_after_the_owner_removed_the_folder(tmp_path):
    publish(WEIGHTS.items(), tmp_path / "v", 1)
    mapped = dict(open_publication(tmp_path / "v"))
    for file in (tmp_path / "v").iterdir():
        file.unlink()
    assert_same(mapped, WEIGHTS)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The bytes of a small publication of some buckets, by file name."""
    folder = tmp_path_factory.mktemp("intact") / "v"
    publish(WEIGHTS.items(), folder, 3, bucket_bytes=60)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


@settings(max_examples=150)
@given(data=st.data())
def test_any_damaged_byte_is_refused_by_name(intact, tmp_path_factory, data):
    name = data.draw(st.sampled_from(sorted(intact)))
    position = data.draw(st.integers(0, len(intact[name]) - 1))
    flip = data.draw(st.integers(1, 255))
    damaged = bytearray(intact[name])
    damaged[position] ^= flip
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write(folder, {**intact, name: bytes(damaged)})
    with pytest.raises(PublicationError, match=name):
        open_publication(folder)


@given(data=st.data())
def test_any_truncation_is_refused_by_name(intact, tmp_path_factory, data):
    name = data.draw(st.sampled_from(sorted(intact)))
    length = data.draw(st.integers(0, len(intact[name]) - 1))
    folder = tmp_path_factory.getbasetemp() / "truncated"
    write(folder, {**intact, name: intact[name][:length]})
    with pytest.raises(PublicationError, match=name):
        open_publication(folder)


@pytest.mark.parametrize("name", ["manifest.json", "bucket_00001.safetensors"])
def test_missing_file_is_refused_by_name(intact, tmp_path, name):
    write(tmp_path, {other: data for other, data in intact.items() if other != name})
    with pytest.raises(PublicationError, match=f"{name} is missing"):
        open_publication(tmp_path)


def test_more_than_one_chunk(tmp_path):
    """Hashed in pieces that end where neither a weight nor the file does."""
    sizes = [CHUNK_BYTES // 2, 5, CHUNK_BYTES, 3, CHUNK_BYTES // 2 + 7]
    weights = {f"w{i}": torch.randint(0, 255, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    publish(weights.items(), tmp_path / "v", 1, key="k")
    found = dict(open_publication(tmp_path / "v", key="k"))
    assert_same(found, weights)
    file = tmp_path / "v" / "bucket_00000.safetensors"
    for position in (CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 10):
        with file.open("r+b") as content:
            content.seek(position)
            byte = content.read(1)
            content.seek(position)
            content.write(bytes([byte[0] ^ 1]))
        with pytest.raises(PublicationError, match="bucket_00000.safetensors is damaged"):
            open_publication(tmp_path / "v", key="k")
        with file.open("r+b") as content:
            content.seek(position)
            content.write(byte)
    open_publication(tmp_path / "v", key="k")


@pytest.mark.parametrize("key", ["", "the attacker's", "k" * 63])
def test_what_was_written_without_the_key_is_refused(tmp_path, key):
    """Whoever can write to the folder can make all of it fit together, but not the MAC."""
    publish(WEIGHTS.items(), tmp_path / "v", 1, key="k" * 64)
    assert open_publication(tmp_path / "v", version=1, key="k" * 64).version == 1
    swapped = {name: tensor + 1 for name, tensor in WEIGHTS.items() if name != "odd"}
    publish({**WEIGHTS, **swapped}.items(), tmp_path / "v", 1, key=key)
    with pytest.raises(PublicationError, match="damaged, or was written by somebody else"):
        open_publication(tmp_path / "v", version=1, key="k" * 64)


def test_a_manifest_of_an_earlier_version_does_not_pass_for_a_later_one(tmp_path):
    publish(WEIGHTS.items(), tmp_path / "v1", 1, key="k")
    os.rename(tmp_path / "v1", tmp_path / "v2")
    with pytest.raises(PublicationError, match="holds version 1, expected 2"):
        open_publication(tmp_path / "v2", version=2, key="k")


@pytest.mark.parametrize("name", ["manifest.json", "bucket_00000.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    publish(WEIGHTS.items(), tmp_path / "v", 1)
    file = tmp_path / "v" / name
    file.rename(tmp_path / "real")
    {
        "pipe": lambda: os.mkfifo(file),
        "link": lambda: file.symlink_to(tmp_path / "real"),
        "folder": file.mkdir,
    }[kind]()
    with pytest.raises(PublicationError, match=name):
        open_publication(tmp_path / "v")


def test_another_version_than_expected(tmp_path):
    publish(WEIGHTS.items(), tmp_path / "v", 3)
    assert open_publication(tmp_path / "v", version=3).version == 3
    with pytest.raises(PublicationError, match="holds version 3, expected 4"):
        open_publication(tmp_path / "v", version=4)


def test_missing_folder(tmp_path):
    with pytest.raises(PublicationError, match="no such publication folder"):
        open_publication(tmp_path / "absent")


def signed(intact, **changes):
    """A manifest with `changes` and a right checksum: what another program might write."""
    body = json.loads(intact["manifest.json"])
    del body["mac"]
    return {**intact, "manifest.json": seal({**body, **changes}, "")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "areal-weights-9"}, "areal-weights-9"),
        ({"tensors": {}}, "nothing of it"),
        ({"buckets": [{"file": "../../etc/passwd", "nbytes": 1, "sha256": ""}]}, "not a manifest"),
        ({"buckets": [{"file": 3}]}, "not a manifest"),
        ({"buckets": []}, "in no bucket"),
        ({"version": "7"}, "not a manifest"),
    ],
)
def test_wrong_content_with_right_checksum(intact, tmp_path, changes, message):
    write(tmp_path, signed(intact, **changes))
    with pytest.raises(PublicationError, match=message):
        open_publication(tmp_path)


def test_weight_of_another_shape_than_the_manifest_says(intact, tmp_path):
    tensors = json.loads(intact["manifest.json"])["tensors"]
    tensors["scale"] = {"dtype": "F32", "shape": [1]}
    write(tmp_path, signed(intact, tensors=tensors))
    with pytest.raises(PublicationError, match="weight scale"):
        open_publication(tmp_path)
