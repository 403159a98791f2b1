"""A checkpoint that somebody else made is data: whatever it holds, loading it runs no code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from fsdp_world import open_engine, weights_of
from tiny import write_tiny_model

from areal.api.io_struct import SaveLoadMeta
from areal.engine.train import checkpoint
from areal.utils.manifest import DamagedError, describe, list_files, write_manifest


class Attack:
    """Unpickled, it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return open_engine(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3"), "archon:d1")


@pytest.fixture
def whole(engine, tmp_path) -> Path:
    engine.save(point(tmp_path / "whole"))
    return tmp_path / "whole"


def point(path: Path) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(path), weight_format="dcp", with_optim=True)


def sign(folder: Path) -> Path:
    """Whoever makes a folder can make its manifest."""
    (folder / "manifest.json").unlink(missing_ok=True)
    write_manifest(folder, describe(folder, list_files(folder)), {})
    return folder


def refused(engine, folder: Path, name: str) -> None:
    for read in (lambda: engine.load(point(folder)), lambda: checkpoint.digests(folder)):
        with pytest.raises(DamagedError, match=name):
            read()


def test_a_pickled_index_is_refused_by_name_and_not_read(engine, tmp_path):
    """torch's own storage would unpickle `.metadata` first of all."""
    folder, trace = tmp_path / "foreign", tmp_path / "attacked"
    before = weights_of(engine)
    dcp.save({f"weights.{k}": v for k, v in before.items()}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(trace)))
    refused(engine, sign(folder), r"index\.json: missing")
    assert not trace.exists()


def test_a_pickle_in_place_of_a_tensor_is_only_bytes(engine, whole, tmp_path):
    trace = tmp_path / "attacked"
    shard = whole / "rank0.bin"
    shard.write_bytes(pickle.dumps(Attack(trace)).ljust(shard.stat().st_size, b"\0"))
    checkpoint.digests(sign(whole))
    assert not trace.exists()


def first_entry(index: dict) -> dict:
    return index["tensors"]["counters"]


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(format=99),
        lambda index: index.update(tensors=[]),
        lambda index: first_entry(index).update(dtype="load"),
        lambda index: first_entry(index).update(dtype="__builtins__"),
        lambda index: first_entry(index).update(size=[10**9]),
        lambda index: first_entry(index).update(size=[2]),
        lambda index: first_entry(index).update(size="3"),
        lambda index: (
            first_entry(index).update(size=[0, 2**70])
            or first_entry(index)["chunks"][0].update(sizes=[0, 2**70], offsets=[0, 0])
        ),
        lambda index: first_entry(index)["chunks"][0].update(sizes=[-3]),
        lambda index: first_entry(index)["chunks"][0].update(sizes=[1]),
        lambda index: first_entry(index)["chunks"][0].update(offsets=[1]),
        lambda index: first_entry(index)["chunks"][0].update(offsets=[True]),
        lambda index: first_entry(index)["chunks"][0].update(at=-8),
        lambda index: first_entry(index)["chunks"][0].update(at=10**15),
        lambda index: first_entry(index)["chunks"][0].update(file="../../../../etc/passwd"),
        lambda index: first_entry(index)["chunks"][0].update(file="rank7.bin"),
        lambda index: first_entry(index)["chunks"].append(first_entry(index)["chunks"][0]),
        lambda index: first_entry(index).pop("chunks"),
        lambda index: first_entry(index).update(chunks=[7]),
    ],
)
def test_an_index_that_does_not_describe_the_files_is_refused(engine, whole, change):
    file = whole / "index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    refused(engine, sign(whole), r"index\.json: ")


def test_text_that_is_no_index_is_refused(engine, whole):
    for text in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        (whole / "index.json").write_bytes(text)
        refused(engine, sign(whole), r"index\.json: ")


def test_a_copy_is_as_good(engine, whole, tmp_path):
    before = checkpoint.digests(whole)
    assert checkpoint.digests(Path(shutil.copytree(whole, tmp_path / "copy"))) == before
    engine.load(point(tmp_path / "copy"))
