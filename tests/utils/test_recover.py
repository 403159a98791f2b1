"""All or nothing: damage is named, a kill leaves the point before, the config is checked."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.utils.recover import RecoverError, RecoverStore

IDENTITY = {"actor.path": "tiny", "seed": 1}


def write_weights(folder: Path) -> None:
    (folder / "dcp").mkdir()
    (folder / "dcp" / "shard.bin").write_bytes(bytes(range(256)) * 40)


def store(root: Path, **changes) -> RecoverStore:
    return RecoverStore(root, **{"identity": IDENTITY, "keep": 2, **changes})


def test_fresh_run_has_no_point_and_asking_creates_none(tmp_path):
    assert store(tmp_path / "recover").latest() is None
    assert store(tmp_path / "recover").oldest_step() is None
    assert not (tmp_path / "recover").exists()


def test_round_trip(tmp_path):
    path = store(tmp_path).save(7, write_weights, {"timer": {"steps": 2}, "list": [1, 2.5]})
    point = store(tmp_path).latest()
    assert point.path == path == tmp_path / "step_7"
    assert point.global_step == 7
    assert point.load() == {"timer": {"steps": 2}, "list": [1, 2.5]}


def test_only_the_newest_points_are_kept_in_number_order(tmp_path):
    points = store(tmp_path)
    for step in (8, 9, 10, 11):
        points.save(step, write_weights, {"at": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_11"]
    assert points.latest().load() == {"at": 11}
    assert points.oldest_step() == 10


def test_saving_a_step_again_replaces_it(tmp_path):
    points = store(tmp_path)
    points.save(3, write_weights, {"try": 1})
    points.save(3, write_weights, {"try": 2})
    assert points.latest().load() == {"try": 2}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: (p / "dcp/shard.bin").write_bytes(b"short"),
            r"dcp/shard.bin: 5 bytes, expected",
        ),
        (lambda p: (p / "dcp/shard.bin").unlink(), "dcp/shard.bin: missing"),
        (lambda p: (p / "state.json").write_text('{"a": 2}'), "state.json: its checksum differs"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json: missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json: unreadable"),
        (lambda p: (p / "manifest.json").write_text('{"format": 99}'), "format 99, expected 1"),
    ],
)
def test_damage_is_named_and_never_a_fresh_start(tmp_path, damage, message):
    points = store(tmp_path)
    points.save(1, write_weights, {"a": 1})
    points.save(2, write_weights, {"a": 1})
    damage(tmp_path / "step_2")
    with pytest.raises(RecoverError, match=message) as error:
        points.latest().load()
    assert "step_2" in str(error.value) and "Delete that folder" in str(error.value)


@given(position=st.integers(0, 256 * 40 - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory, position, bit):
    root = tmp_path_factory.mktemp("recover")
    path = store(root).save(1, write_weights, {})
    file = path / "dcp" / "shard.bin"
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)
    with pytest.raises(RecoverError, match="checksum"):
        store(root).latest().load()


def test_changed_config_is_refused_with_the_values(tmp_path):
    store(tmp_path).save(1, write_weights, {})
    other = store(tmp_path, identity={"actor.path": "big", "seed": 1})
    with pytest.raises(ValueError, match="actor.path was 'tiny', now 'big'") as error:
        other.latest().load()
    assert "seed" not in str(error.value)


def test_failed_save_keeps_the_point_before(tmp_path):
    points = store(tmp_path, keep=1)
    points.save(1, write_weights, {"good": True})

    def run_out_of_disk(folder: Path) -> None:
        write_weights(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        points.save(2, run_out_of_disk, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert points.latest().load() == {"good": True}


def test_kill_in_the_middle_of_a_save_keeps_the_point_before(tmp_path):
    store(tmp_path, keep=1).save(1, write_weights, {"good": True})
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from areal.utils.recover import RecoverStore\n"
        "def die(folder):\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "RecoverStore(Path(sys.argv[1]), identity={}, keep=1).save(2, die, {})\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2  # the half-written sibling is still there
    assert store(tmp_path).latest().load() == {"good": True}
    assert os.listdir(tmp_path) == ["step_1"]


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="recover.keep must be at least 1, got 0"):
        store(tmp_path, keep=0)
