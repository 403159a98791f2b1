"""`areal runs`, `show`, `top`, `clean` and `dash --export`, as a user calls them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
from dashboard_world import WrittenRun

from areal.cli.main import main
from areal.run.database import RunDatabase


@pytest.fixture
def run(tmp_path):
    run = WrittenRun(tmp_path / "math" / "first", steps=3)
    run.finish()
    return run.root


def age(folder) -> None:
    for file in folder.glob("run.db*"):
        os.utime(file, (1.0, 1.0))


def test_runs_are_listed_with_their_state(run, tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_bytes(b"no database " * 500)
    assert main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"math/first +finished +3/40 +0\.500", printed)
    assert "unreadable" in printed and "cannot read" in printed
    assert main(["runs", str(tmp_path), "--json"]) == 0
    states = {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)["runs"]}
    assert states["math/first"] == "finished" and "unreadable" in states.values()
    assert main(["runs", str(tmp_path / "absent")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_stories_in_text(run, capsys):
    assert main(["show", str(run), "--prompt", "0"]) == 0
    assert "trained in step 0" in capsys.readouterr().out
    assert main(["show", str(run), "--step", "2"]) == 0
    printed = capsys.readouterr().out
    assert "rollout/reward" in printed and "4/1" in printed
    assert main(["show", str(run), "--sample", "4/1"]) == 0
    assert re.search(r"\byes +-2 +4\.48\d+ +1 +0\.5 +2\n", capsys.readouterr().out)
    assert main(["show", str(run), "--sample", "4/1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 0.0


def test_runs_of_several_folders_are_listed_once_each(run, tmp_path, capsys):
    WrittenRun(tmp_path / "other" / "second", steps=1).finish()
    assert main(["runs", str(run), str(tmp_path), str(tmp_path / "other"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [one["name"] for one in listed] == ["math/first", "other/second"]
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 2
    assert "no run.db at most four levels below" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--prompt", "99", "has issued no such prompt"),
        ("--step", "9", "its newest is 2"),
        ("--sample", "7/0", "has not stored it"),
        ("--sample", "one", "such as 12/0"),
    ],
)
def test_a_story_that_is_not_there_is_one_line(run, capsys, option, value, error):
    assert main(["show", str(run), option, value]) == 2
    shown = capsys.readouterr().err
    assert error in shown and shown.count("\n") == 1


def test_one_picture_of_a_run(run, capsys):
    assert main(["top", str(run), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "step 3/40" in printed and "Largest loss" in printed and "trained 6" in printed


def in_terminal(rows: int, columns: int, *argv: str) -> str:
    """What the program writes to a terminal of this size."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("LINES", "COLUMNS")}
    command = [sys.executable, "-m", "areal.cli.main", *argv]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as program:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # EIO: the program has closed it
            while chunk := os.read(ours, 1 << 16):
                written += chunk
        os.close(ours)
        assert program.wait() == 0
    return written.decode()


@pytest.mark.parametrize(("rows", "columns"), [(12, 50), (60, 160)])
def test_a_picture_fits_its_terminal(run, rows, columns):
    written = in_terminal(rows, columns, "top", str(run))
    drawn, after = written.split("\x1b[?1049h")[1].split("\x1b[?1049l")
    lines = re.sub(r"\x1b\[\??\d*[A-Za-z]|\r", "", drawn).split("\n")
    assert "step 3/40" in lines[0] and len(lines) <= rows
    assert max(map(len, lines)) <= columns
    assert "trained 6" in after and "Largest loss of the prompts" in after, "all of it, to scroll"


def test_texts_of_a_run_do_not_reach_the_terminal_as_commands(tmp_path, capsys):
    run = WrittenRun(tmp_path)
    with run.database.transaction() as connection:
        connection.execute("UPDATE samples SET output = ?", ("\x1b]0;title\x07\x9b31m\u202e",))
    run.close()
    for command in (["top", "--once"], ["show", "--step", "2"], ["show", "--prompt", "4"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 0
        assert not set("\x1b\x07\x9b\u202e") & set(capsys.readouterr().out)


def make(folder, *files: str):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"x" * 100)


KEPT = ("recover/step_1/state.json", "checkpoints/actor/epoch0epochstep5globalstep5/model.bin")
DOOMED = ("weights/1/a", "tmp/b", "recover/.step_2.tmp-999999999-0123abcd/c")


def test_a_run_that_can_resume_keeps_what_it_needs(tmp_path, capsys):
    run = WrittenRun(tmp_path)
    make(tmp_path, *KEPT, *DOOMED, "checkpoints/actor/epoch0epochstep1globalstep1/model.bin")
    run.close()
    age(tmp_path)
    assert main(["clean", str(tmp_path), "--checkpoints"]) == 0
    assert "4 folders can be deleted" in capsys.readouterr().out
    assert all((tmp_path / file).exists() for file in KEPT + DOOMED)  # only said so
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert all((tmp_path / file).exists() for file in KEPT)
    assert not any((tmp_path / file).exists() for file in DOOMED)
    assert (tmp_path / "checkpoints/actor/epoch0epochstep1globalstep1").exists()
    assert main(["clean", str(tmp_path), "--checkpoints", "--yes"]) == 0
    assert not (tmp_path / "checkpoints/actor/epoch0epochstep1globalstep1").exists()
    assert all((tmp_path / file).exists() for file in KEPT)


def test_recover_points_of_a_finished_run_go(run, capsys):
    make(run, *KEPT, "model/model.safetensors")
    age(run)
    assert main(["clean", str(run), "--yes"]) == 0
    assert not (run / "recover").exists() and (run / "model").exists()
    assert main(["clean", str(run)]) == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_runs_that_were_written_just_now_or_cannot_be_read_are_left_alone(tmp_path, capsys):
    for name in ("fresh", "unreadable"):
        make(tmp_path / name, *DOOMED)
    (tmp_path / "unreadable" / "run.db").write_bytes(b"no database " * 500)
    age(tmp_path / "unreadable")
    WrittenRun(tmp_path / "fresh").finish()
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_a_run_that_was_started_meanwhile_is_left_alone(tmp_path):
    from areal.dashboard.clean import delete_waste, find_waste
    from areal.run.database import RunDatabaseError

    make(tmp_path, *DOOMED)
    WrittenRun(tmp_path).close()
    age(tmp_path)
    found = find_waste(tmp_path, checkpoints=False)
    assert found
    with RunDatabase(tmp_path / "run.db"), pytest.raises(RunDatabaseError):
        delete_waste(found)
    assert all((tmp_path / file).exists() for file in DOOMED)


def test_a_file_to_share_holds_page_and_data(run, tmp_path, capsys):
    file = tmp_path / "out.html"
    assert main(["dash", str(run), "--export", str(file)]) == 0
    text = file.read_text()
    assert "src=" not in text and "href=" not in text.split("<script")[0]  # asks nobody
    data = re.search(r'id="embedded">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    embedded = json.loads(data[1])
    assert embedded["run/0/now"]["summary"]["num_steps"] == 3
    assert embedded["run/0/sample/4/1"]["reward"] == 0.0
    assert main(["dash", str(tmp_path / "absent")]) == 2
    assert main(["dash", str(tmp_path), "--port", "70000"]) == 2
