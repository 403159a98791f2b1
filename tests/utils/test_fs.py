"""atomic_folder and atomic_write_*: all or nothing, whatever goes wrong in between."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
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


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        RuntimeError("error sending request (os error 111)"),
    ],
)
def test_a_fault_of_a_network_is_not_taken_for_one_of_the_disk(tmp_path, error):
    """Whoever fills the folder may speak to others for it."""
    with pytest.raises(type(error)) as caught, fs.atomic_folder(tmp_path / "point"):
        raise error
    assert caught.value is error


def test_what_a_disk_refuses_is_told_from_the_rest():
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES):
        assert fs.is_disk_fault(OSError(code, os.strerror(code)))
    for code in (errno.ECONNREFUSED, errno.EPIPE, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EAGAIN):
        assert not fs.is_disk_fault(OSError(code, os.strerror(code)))
    assert not fs.is_disk_fault(OSError("an exception of some HTTP library"))


@pytest.fixture(params=[0o000, 0o022, 0o177])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root):
    return {
        str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode)
        for path in root.rglob("*")
        if not path.is_symlink()
    }


def test_what_is_made_is_private_whatever_the_umask(tmp_path, umask):
    (tmp_path / "theirs").write_text("of somebody else")
    os.chmod(tmp_path / "theirs", 0o644)
    fs.private_folder(tmp_path / "run" / "logs")
    fs.atomic_write_text(tmp_path / "run" / "dumps" / "1" / "a", "text")
    fs.open_private(tmp_path / "run" / "logs" / "main.log", "a").close()
    with fs.atomic_folder(tmp_path / "run" / "point") as folder:
        os.makedirs(folder / "actor", 0o777)
        os.chmod(folder / "actor", 0o777)
        (folder / "actor" / "shard").write_text("1")
        os.chmod(folder / "actor" / "shard", 0o666)
        (folder / "link").symlink_to(tmp_path / "theirs")
    folders = ("run", "run/logs", "run/dumps", "run/dumps/1", "run/point", "run/point/actor")
    files = ("run/dumps/1/a", "run/logs/main.log", "run/point/actor/shard")
    private = dict.fromkeys(folders, 0o700) | dict.fromkeys(files, 0o600)
    assert modes(tmp_path) == private | {"theirs": 0o644}


def test_a_file_that_was_open_to_others_is_closed_to_them(tmp_path):
    file = tmp_path / "main.log"
    file.write_text("old\n")
    os.chmod(file, 0o666)
    with fs.open_private(file, "a") as opened:
        opened.write("new\n")
    assert file.read_text() == "old\nnew\n" and modes(tmp_path) == {"main.log": 0o600}


def test_what_is_to_be_passed_on_has_the_modes_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with fs.atomic_folder(tmp_path / "out" / "model", private=False) as folder:
            (folder / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert modes(tmp_path) == {"out": 0o750, "out/model": 0o750, "out/model/config.json": 0o640}


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
