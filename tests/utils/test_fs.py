"""atomic_folder and atomic_write_*: all or nothing, whatever goes wrong in between."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.utils import fs


@contextlib.contextmanager
def file_size_limit(nbytes):
    """The kernel refuses longer writes, as a full disk does. Nothing of ours is patched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


@pytest.mark.parametrize("durable", [True, False])
def test_folder_appears_whole(tmp_path, durable):
    target = tmp_path / "deep" / "point"
    with fs.atomic_folder(target, durable=durable) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")
        assert not target.exists()
    assert (target / "inner" / "a").read_text() == "1"
    assert os.listdir(target.parent) == ["point"]


def test_folder_replaces_an_older_one(tmp_path):
    target = tmp_path / "point"
    for text in ("old", "new"):
        with fs.atomic_folder(target) as folder:
            (folder / text).write_text(text)
    assert os.listdir(target) == ["new"]
    assert os.listdir(tmp_path) == ["point"]


def test_folder_of_a_failed_block_never_appears(tmp_path):
    target = tmp_path / "point"
    with fs.atomic_folder(target) as folder:
        (folder / "a").write_text("kept")
    with pytest.raises(KeyError), fs.atomic_folder(target) as folder:
        (folder / "a").write_text("lost")
        raise KeyError("the writer failed")
    assert (target / "a").read_text() == "kept"
    assert os.listdir(tmp_path) == ["point"]


@given(data=st.binary(max_size=100))
def test_bytes_round_trip(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fs") / "file"
    fs.atomic_write_bytes(path, b"before")
    fs.atomic_write_bytes(path, data, durable=False)
    assert path.read_bytes() == data


def test_text_is_utf8(tmp_path):
    fs.atomic_write_text(tmp_path / "a", "größer")
    assert (tmp_path / "a").read_bytes() == "größer".encode()


def test_full_disk_leaves_the_old_file_and_names_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with file_size_limit(1000), pytest.raises(OSError) as caught:
        fs.atomic_write_bytes(path, bytes(5000))
    assert caught.value.errno == errno.EFBIG
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_leaves_no_folder(tmp_path):
    target = tmp_path / "point"
    with file_size_limit(1000), pytest.raises(OSError, match="point"):  # noqa: SIM117
        with fs.atomic_folder(target) as folder:
            (folder / "a").write_bytes(bytes(500))
            (folder / "b").write_bytes(bytes(5000))
    assert os.listdir(tmp_path) == []


def test_a_fault_elsewhere_keeps_its_own_message(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"), fs.atomic_folder(tmp_path / "point"):
        (tmp_path / "absent").read_text()


def test_killed_writer_leaves_only_a_leftover_that_can_be_removed(tmp_path):
    script = (
        "import os, sys\n"
        "from areal.utils import fs\n"
        "with fs.atomic_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'a').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    target = tmp_path / "point"
    done = subprocess.run([sys.executable, "-c", script, str(target)])
    assert done.returncode == -9
    assert not target.exists()
    assert len(os.listdir(tmp_path)) == 1

    with fs.atomic_folder(tmp_path / "other"):
        removed = fs.remove_leftovers(tmp_path)  # spares the scratch folder of this live process
    assert len(removed) == 1
    assert os.listdir(tmp_path) == ["other"]


def test_a_full_disk_met_by_a_library_in_rust_is_an_os_error_too(tmp_path):
    with (
        pytest.raises(OSError, match="could not write .*model") as error,
        fs.atomic_folder(tmp_path / "model"),
    ):
        raise Exception("No space left on device (os error 28)")
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
