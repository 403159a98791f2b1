"""All or nothing: damage is named, a kill leaves the point before, the config is checked."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.run.database import LedgerView
from areal.run.recover import RecoverError, RecoverPoint, RecoverStore
from areal.utils.manifest import (
    DamagedError,
    check_files,
    describe,
    read_manifest,
    write_manifest,
)

IDENTITY = {"actor.path": "tiny", "seed": 1}
# A ledger that knows every point of these tests.
LEDGER = LedgerView(
    path=Path("run.db"),
    num_steps=20,
    marks={step: f"mark of {step}" for step in range(20)},
    whole=None,
    is_finished=False,
)


def write_weights(folder: Path) -> None:
    (folder / "dcp").mkdir()
    (folder / "dcp" / "shard.bin").write_bytes(bytes(range(256)) * 40)


def load(points: RecoverStore) -> dict | None:
    return points.read_newest(RecoverPoint.load)


def store(root: Path, ledger: LedgerView = LEDGER, **changes) -> RecoverStore:
    return RecoverStore(root, lambda: ledger, **{"identity": IDENTITY, "keep": 2, **changes})


def save(points: RecoverStore, step: int, state: dict, write=write_weights) -> Path:
    return points.save(step, LEDGER.marks[step], write, state)


def test_fresh_run_has_no_point_and_asking_creates_none(tmp_path):
    assert load(store(tmp_path / "recover")) is None
    assert store(tmp_path / "recover").oldest_step() is None
    assert not (tmp_path / "recover").exists()


def test_round_trip(tmp_path):
    path = save(store(tmp_path), 7, {"timer": {"steps": 2}, "list": [1, 2.5]})
    (point,) = store(tmp_path).points()
    assert point.path == path == tmp_path / "step_7"
    assert point.global_step == 7
    assert point.load() == {"timer": {"steps": 2}, "list": [1, 2.5]}


def test_only_the_newest_points_are_kept_in_number_order(tmp_path):
    points = store(tmp_path)
    for step in (8, 9, 10, 11):
        save(points, step, {"at": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_11"]
    assert load(points) == {"at": 11}
    assert points.oldest_step() == 10


def test_saving_a_step_again_replaces_it(tmp_path):
    points = store(tmp_path)
    save(points, 3, {"try": 1})
    save(points, 3, {"try": 2})
    assert load(points) == {"try": 2}


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
        (lambda p: (p / "manifest.json").write_text('{"format": 99}'), "format 99, expected 2"),
        (lambda p: (p / "dcp/other.bin").write_bytes(b"x"), "dcp/other.bin: foreign"),
        (lambda p: shutil.copytree(p.parent / "step_1", p, dirs_exist_ok=True), "of step 1"),
    ],
)
def test_damage_is_named_and_never_a_fresh_start(tmp_path, damage, message):
    points = store(tmp_path)
    save(points, 1, {"a": 1})
    save(points, 2, {"a": 1})
    damage(tmp_path / "step_2")
    with pytest.raises(RecoverError, match=message) as error:
        load(points)
    assert "step_2" in str(error.value) and "recover.on_damage=previous" in str(error.value)
    assert load(store(tmp_path, on_damage="previous")) == {"a": 1}


@pytest.mark.parametrize(
    "facts",
    [
        {"global_step": 1, "identity": IDENTITY},  # as before points had marks
        {"global_step": 1, "identity": 7, "mark": LEDGER.marks[1]},
        {},
    ],
)
def test_a_point_of_another_areal_is_refused_by_name(tmp_path, facts):
    path = save(store(tmp_path), 1, {"a": 1})
    write_manifest(path, describe(path, ["dcp/shard.bin", "state.json"]), facts)
    with pytest.raises(RecoverError, match=r"step_1 is damaged: manifest\.json: written by an"):
        load(store(tmp_path))


@pytest.mark.parametrize("files", [{"state.json": 7}, {"state.json": {"nbytes": 1}}])
def test_a_manifest_that_describes_no_files_is_refused_by_name(tmp_path, files):
    path = save(store(tmp_path), 1, {"a": 1})
    write_manifest(path, files, {})
    with pytest.raises(RecoverError, match=r"step_1 is damaged: manifest\.json: malformed"):
        load(store(tmp_path))


def test_the_only_point_damaged_is_an_error_also_when_the_one_before_may_be_taken(tmp_path):
    points = store(tmp_path, on_damage="previous")
    save(points, 1, {})
    (tmp_path / "step_1" / "state.json").unlink()
    with pytest.raises(RecoverError, match="state.json: missing.*choose a new trial_name"):
        load(points)


def test_a_damaged_point_left_behind_does_not_push_out_good_ones(tmp_path):
    points = store(tmp_path, keep=1, on_damage="previous")
    for step in (3, 9):
        save(store(tmp_path), step, {"at": step})
    (tmp_path / "step_9" / "state.json").unlink()
    assert load(points) == {"at": 3}
    save(points, 4, {"at": 4})
    assert os.listdir(tmp_path) == ["step_4"]


def test_files_an_inner_manifest_vouches_for_are_left_to_its_reader(tmp_path):
    def write_vouched(folder: Path) -> None:
        write_weights(folder)
        write_manifest(folder / "dcp", describe(folder / "dcp", ["shard.bin"]), {})

    path = save(store(tmp_path), 1, {"a": 1}, write_vouched)
    (path / "dcp" / "shard.bin").write_bytes(b"changed")
    assert load(store(tmp_path)) == {"a": 1}
    with pytest.raises(DamagedError, match="shard.bin: 7 bytes, expected 10240"):
        check_files(path / "dcp", read_manifest(path / "dcp"), ["shard.bin"])
    (path / "dcp" / "manifest.json").write_text("{}")
    with pytest.raises(RecoverError, match="dcp/manifest.json: 2 bytes"):
        load(store(tmp_path))


@given(
    name=st.sampled_from(["dcp/shard.bin", "state.json", "manifest.json"]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
@settings(deadline=None)
def test_any_flipped_bit_is_found(tmp_path_factory, name, where, bit):
    root = tmp_path_factory.mktemp("recover")
    file = save(store(root), 1, {"some": "state"}) / name
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    file.write_bytes(data)
    with pytest.raises(RecoverError, match=f"step_1 is damaged: {name}"):
        load(store(root))


def test_changed_config_is_refused_with_the_values(tmp_path):
    save(store(tmp_path), 1, {})
    other = store(tmp_path, identity={"actor.path": "big", "seed": 1})
    with pytest.raises(ValueError, match="actor.path was 'tiny', now 'big'") as error:
        load(other)
    assert "seed" not in str(error.value)


def test_failed_save_keeps_the_point_before(tmp_path):
    points = store(tmp_path, keep=1)
    save(points, 1, {"good": True})

    def run_out_of_disk(folder: Path) -> None:
        write_weights(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save(points, 2, {}, run_out_of_disk)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert load(points) == {"good": True}


def test_kill_in_the_middle_of_a_save_keeps_the_point_before(tmp_path):
    save(store(tmp_path, keep=1), 1, {"good": True})
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from areal.run.recover import RecoverStore\n"
        "def die(folder):\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "RecoverStore(Path(sys.argv[1]), None, identity={}, keep=1).save(2, 'mark', die, {})\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=900)
    assert child.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2  # the half-written sibling is still there
    assert load(store(tmp_path)) == {"good": True}
    assert os.listdir(tmp_path) == ["step_1"]


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="recover.keep must be at least 1, got 0"):
        store(tmp_path, keep=0)
