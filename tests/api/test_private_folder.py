"""Private folders: for one user, for one process, and gone with it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal.api.private_folder import LOCK, PrivateFolder, remove_tree

MAKE = """
import os, sys
from areal.api.private_folder import PrivateFolder
folder = PrivateFolder(sys.argv[1], prefix="areal-test-")
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


def start_owner(place):
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(place)],
        stdin=-1,
        stdout=-1,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    return process, Path(process.stdout.readline().strip())


def test_only_its_user_may_enter_and_nobody_knows_the_name(tmp_path):
    folders = [PrivateFolder(tmp_path, prefix="areal-test-", name="a") for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert folder.path.name.startswith("areal-test-a-")
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_holds_is_not(tmp_path):
    killed, left = start_owner(tmp_path)
    alive, held = start_owner(tmp_path)
    killed.kill()
    killed.communicate()
    assert (left / "file").exists()
    with_others = PrivateFolder(tmp_path, prefix="areal-other-")
    assert left.exists(), "another prefix is not ours to sweep"
    ours = PrivateFolder(tmp_path, prefix="areal-test-")
    assert not left.exists() and (held / "file").exists()
    ours.close()
    with_others.close()
    alive.kill()
    alive.communicate()


def test_links_and_open_folders_are_left_alone(tmp_path):
    """Somebody else may have put them there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / LOCK).touch()
    (elsewhere / "kept").write_text("x")
    (tmp_path / "areal-test-link").symlink_to(elsewhere)
    loose = tmp_path / "areal-test-loose"
    loose.mkdir()
    loose.chmod(0o777)
    (loose / LOCK).touch()
    new = tmp_path / "areal-test-new"  # of a process that has not taken its lock yet
    new.mkdir(mode=0o700)
    PrivateFolder(tmp_path, prefix="areal-test-").close()
    assert (elsewhere / "kept").exists() and loose.is_dir() and new.is_dir()
    os.utime(new, (time.time() - 7200,) * 2)
    PrivateFolder(tmp_path, prefix="areal-test-").close()
    assert not new.exists()


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
