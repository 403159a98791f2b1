"""`areal env create`: a venv with the package, or pip's own words and nothing left behind."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from areal.cli.env import RECIPES, create, interpreter_for
from areal.cli.main import main
from areal.utils.server_envs import find_interpreter


def write_wheel(folder: Path, name: str) -> Path:
    """A package of one line, as pip installs it without a network."""
    wheel = folder / f"{name}-0.0.1-py3-none-any.whl"
    info = f"{name}-0.0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "__version__ = '0.0.1'\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.mark.slow
def test_an_environment_the_config_finds_by_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AREAL_ENVS", str(tmp_path / "envs"))
    monkeypatch.delenv("AREAL_SGLANG_PYTHON", raising=False)
    with pytest.raises(ValueError, match="areal env create sglang"):
        find_interpreter("sglang")
    wheel = write_wheel(tmp_path, "sglang")
    assert main(["env", "create", "sglang", "--requirement", str(wheel)]) == 0
    out = capsys.readouterr().out
    assert "backend: sglang:d1" in out and "python:" not in out
    assert find_interpreter("sglang") == str(tmp_path / "envs/sglang/bin/python")
    assert main(["env", "create", "sglang", "--requirement", str(wheel)]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failure_shows_what_pip_said_and_leaves_nothing(tmp_path, capsys):
    folder = tmp_path / "env"
    missing = tmp_path / "no_such_package-1.0-py3-none-any.whl"
    argv = ["env", "create", "vllm", "--path", str(folder), "--requirement", str(missing)]
    assert main(argv) == 1
    assert "no_such_package" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.slow
def test_a_package_that_does_not_import_is_no_environment(tmp_path):
    folder = tmp_path / "env"
    wheel = write_wheel(tmp_path, "something_else")
    with pytest.raises(RuntimeError, match="No module named 'vllm'"):
        create("vllm", folder, python=sys.executable, requirement=str(wheel))
    assert not folder.exists()


def test_where_an_interpreter_is_looked_for(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("AREAL_VLLM_PYTHON", str(tmp_path / "absent"))
    assert find_interpreter("vllm", str(program)) == str(program)
    with pytest.raises(ValueError, match="AREAL_VLLM_PYTHON: .* is not a program"):
        find_interpreter("vllm")
    with pytest.raises(ValueError, match="vllm.python: .* is not a program"):
        find_interpreter("vllm", str(tmp_path))


def test_versions_are_pinned():
    for recipe in RECIPES.values():
        assert all("==" in spec for spec in (*recipe.gpu, *recipe.cpu))


def test_a_hub_that_needs_a_newer_python_finds_one_or_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(pretend(tmp_path / "own", "3 11")))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert interpreter_for("textarena") == str(tmp_path / "own")
    assert interpreter_for("vllm", str(tmp_path / "own")) == str(tmp_path / "own")
    install = "harbor needs Python 3.12 or later; areal runs on .*.*apt-get install python3.12-"
    with pytest.raises(ValueError, match=install):
        interpreter_for("harbor")
    pretend(tmp_path / "bin/python3.12", "")  # a shim that leads nowhere
    with pytest.raises(ValueError, match="pyenv install 3.12"):
        interpreter_for("harbor")
    pyenv = pretend(tmp_path / ".pyenv/versions/3.13.0/bin/python", "3 13")
    assert interpreter_for("harbor") == str(pyenv)
    newer = pretend(tmp_path / "bin/python3.13", "3 13")
    assert interpreter_for("harbor") == str(newer)
    with pytest.raises(ValueError, match="own is Python 3.11; harbor needs Python 3.12"):
        interpreter_for("harbor", str(tmp_path / "own"))
    with pytest.raises(ValueError, match="nothing is no Python"):
        interpreter_for("harbor", str(tmp_path / "nothing"))


def pretend(path: Path, version: str) -> Path:
    """A program that says to be this version of Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path
