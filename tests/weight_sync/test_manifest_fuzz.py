"""Publications whose checksums are right and whose content is not: refused by name, always."""

from __future__ import annotations

import json

import json_fuzz
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.utils.manifest import chunked_sha256, seal
from areal.weight_sync.bucket import write_bucket
from areal.weight_sync.publication import (
    FORMAT,
    MANIFEST,
    PublicationError,
    open_publication,
    publish,
)

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publications") / "v3"
    publish(WEIGHTS.items(), folder, 3, durable=False)
    body = json.loads((folder / MANIFEST).read_bytes())
    del body["mac"]
    return folder, body


def loads_or_refuses(folder):
    try:
        list(open_publication(folder))
    except PublicationError as error:
        assert str(folder) in str(error)


def test_any_manifest(good):
    folder, body = good

    @FILES
    @given(json_fuzz.changed(body))
    def one(changed):
        if isinstance(changed, dict):
            (folder / MANIFEST).write_bytes(seal(changed, ""))
        else:
            (folder / MANIFEST).write_bytes(json_fuzz.to_bytes(changed))
        loads_or_refuses(folder)

    one()


def test_any_bytes_as_a_manifest(good):
    folder, _ = good

    @FILES
    @given(st.binary(max_size=60) | json_fuzz.bodies({}))
    def one(content):
        (folder / MANIFEST).write_bytes(content)
        with pytest.raises(PublicationError):
            open_publication(folder)

    one()


def test_any_header_of_a_bucket(tmp_path):
    file = tmp_path / "bucket_00000.safetensors"
    write_bucket(file, WEIGHTS)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]

    def publish_header(raw, length):
        bucket = length.to_bytes(8, "little") + raw + data
        file.write_bytes(bucket)
        with file.open("rb") as written:
            digest = chunked_sha256(written)
        entries = {"file": file.name, "nbytes": len(bucket), "sha256": digest}
        try:
            tensors = {
                name: {"dtype": entry["dtype"], "shape": entry["shape"]}
                for name, entry in json.loads(raw).items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            tensors = {}
        body = {"format": FORMAT, "version": 3, "base_version": None}
        body |= {"buckets": [entries], "tensors": tensors}
        (tmp_path / MANIFEST).write_bytes(seal(body, ""))

    @settings(FILES, max_examples=300)
    @given(json_fuzz.bodies(header), st.none() | st.integers(0, 2**64 - 1))
    def one(raw, length):
        publish_header(raw, len(raw) if length is None else length)
        loads_or_refuses(tmp_path)

    one()
