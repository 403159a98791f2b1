"""Temporary folders: private, gone with their owner, swept after a kill and never before."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.scratch import VARIABLE, ScratchFolder, remove_tree, sweep

HOLD = (
    "import sys\nfrom areal.api.scratch import ScratchFolder\n"
    "scratch = ScratchFolder('test'); (scratch.path / 'file').write_text('x')\n"
    "print(scratch.path, flush=True); sys.stdin.read()"
)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def start_owner() -> tuple[subprocess.Popen, Path]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD], **pipes)
    return process, Path(process.stdout.readline().strip())


def test_it_lies_where_the_run_says_and_goes_when_closed(root):
    scratch = ScratchFolder("test")
    assert scratch.path.parent == root
    assert stat.S_IMODE(scratch.path.stat().st_mode) == 0o700
    scratch.close()
    scratch.close()
    assert list(root.iterdir()) == []
    with ScratchFolder("test") as folder:
        (folder / "inside").mkdir()
    ScratchFolder("test")  # garbage at once
    assert list(root.iterdir()) == []


def test_without_a_run_or_with_one_of_another_machine_it_is_a_temporary_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "elsewhere"))
    with ScratchFolder("test") as folder:
        assert folder.parent == tmp_path
    monkeypatch.delenv(VARIABLE)
    with ScratchFolder("test") as folder:
        assert folder.parent == tmp_path


def test_a_killed_owner_leaves_it_and_the_next_sweep_takes_it(root):
    living, kept = start_owner()
    killed, left = start_owner()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (left / "file").exists()
    assert sweep(root) == [left]
    assert list(root.iterdir()) == [kept]
    living.communicate("", timeout=900)
    assert list(root.iterdir()) == []


def test_names_are_random_and_labels_safe(tmp_path):
    folders = [ScratchFolder("test", place=tmp_path, label="a/../b c") for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        assert folder.path.parent == tmp_path and folder.path.name.startswith(
            "areal-test.a-..-b-c-"
        )
    os.close(os.open(folders[0].path, os.O_RDONLY))  # a reader takes no lock away
    assert sweep(tmp_path) == []
    for folder in folders:
        folder.close()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_ours_are_swept(root, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    (target / "kept").write_text("x")
    (root / "areal-test.link0000").symlink_to(target)
    (root / "areal-test.file0000").write_text("a file")
    (root / "areal-1a2b3c4d").mkdir(mode=0o700)
    (root / "something").mkdir()
    (root / "areal-test.loose000").mkdir()
    (root / "areal-test.loose000").chmod(0o777)  # others may have put something there
    if os.getuid() == 0:
        (root / "areal-test.other000").mkdir(mode=0o700)
        os.chown(root / "areal-test.other000", 12345, -1)
    before = sorted(root.iterdir())
    assert sweep(root) == []
    assert sorted(root.iterdir()) == before and (target / "kept").exists()


def test_whatever_it_holds_is_removed_and_nothing_else(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "kept").write_text("x")
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "broken").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "pipe")
    (folder / "shut" / "deep").mkdir(parents=True)
    (folder / "shut" / "deep" / "file").write_text("x")
    (folder / "shut" / "deep").chmod(0)
    (folder / "shut").chmod(0)
    remove_tree(folder)
    assert not folder.exists()
    assert (outside / "kept").read_text() == "x"
    with pytest.raises(OSError):
        (tmp_path / "link").symlink_to(outside)
        remove_tree(tmp_path / "link")  # a link in its place is not followed
    assert (outside / "kept").exists()


def test_deeper_than_a_path_can_say_and_a_recursion_can_go(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(3000):
            os.mkdir("d" * 40)
            os.chdir("d" * 40)
    finally:
        os.chdir(here)
    remove_tree(folder)
    assert not folder.exists()
