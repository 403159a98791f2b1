"""The command `areal`: help, exit codes, and errors as one line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from areal import __version__
from areal.cli import main as cli
from areal.cli.main import COMMANDS, main


def exit_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(list(argv))
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    code, out, err = exit_of(capsys, *argv)
    assert (code, err) == (0, "")
    assert all(f"\n    {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_module_and_help(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, _ = exit_of(capsys, name, "--help")
    assert code == 0
    assert out.startswith(f"usage: areal {name}")
    assert callable(importlib.import_module(f"areal.cli.{name}").run)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(capsys, "--version")[:2] == (0, f"areal {__version__}\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (
            ["zzz"],
            "unknown command 'zzz'; commands are demo, train, launch, check, plan, convert, ",
        ),
        (["--zzz"], "unknown argument '--zzz'"),
        (["check", "a.yaml", "--actor.lr=1"], "overrides have no dashes: key=value"),
        (["check"], "expected one config file"),
        (["check", "no_such.yaml"], "config file 'no_such.yaml' does not exist"),
        (["check", "a.yaml", "--config"], "expected one argument"),
    ],
)
def test_user_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    code, out, err = exit_of(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("areal")
    assert says in err


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch):
    """A command `fault` that raises what it is given."""

    def install(error: BaseException) -> None:
        module = ModuleType("areal.cli.fault")

        def run(args) -> int:
            raise error

        module.add_arguments, module.run = lambda parser: None, run
        monkeypatch.setitem(sys.modules, "areal.cli.fault", module)
        monkeypatch.setitem(cli.COMMANDS, "fault", "raises")

    return install


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("lr must be\n  above 0"), 2, "areal: error: lr must be above 0"),
        (FileNotFoundError(2, "No such file", "x.yaml"), 2, "areal: error: No such file: x.yaml"),
        (RuntimeError("server died"), 1, "areal: error: server died"),
        (OSError(28, "No space left on device"), 1, "areal: error: No space left on device"),
        (ConnectionError("refused"), 1, "areal: error: refused"),
        (RuntimeError(), 1, "areal: error: RuntimeError"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], raising, error: BaseException, code: int, line: str
) -> None:
    raising(error)
    found, out, err = exit_of(capsys, "fault")
    assert (found, out, err.rstrip("\n")) == (code, "", line)


def test_debug_shows_the_traceback(raising, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_DEBUG", "1")
    raising(ValueError("deep"))
    with pytest.raises(ValueError, match="deep"):
        main(["fault"])


def test_our_own_bugs_keep_their_traceback(raising) -> None:
    raising(KeyError("bug"))
    with pytest.raises(KeyError):
        main(["fault"])


def test_help_as_a_process_imports_nothing_heavy() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['areal', '--help']\n"
        "try:\n    runpy.run_module('areal.cli.main', run_name='__main__')\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        "heavy = ('torch', 'transformers', 'rich', 'omegaconf')\n"
        "print(code, [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_an_output_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    """As in `areal runs | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "areal.cli.main", "runs", str(tmp_path), "--json"],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")
