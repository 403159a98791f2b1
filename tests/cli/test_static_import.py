"""Import paths looked up without running them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal.cli.static_import import check_import_path

MODULE = """
raise SystemExit("a check must not run this")
import os.path as where
if True:
    def inner_fn(): ...
first, second = 1, 2
class Workflow: ...
async def run(): ...
def outer():
    hidden = 1
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user_code_for_check"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('nor this')")
    (folder / "deep" / "__init__.py").write_text("")
    (folder / "deep" / "rewards.py").write_text(MODULE)
    (folder / "star.py").write_text("from os import *\n")
    (folder / "broken.py").write_text("x = 1\ndef (:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_folders_without_an_init_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_folder" / "deep").mkdir(parents=True)
    (tmp_path / "bare_folder" / "deep" / "code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_import_path("bare_folder.deep.code.Workflow")
    with pytest.raises(ValueError, match="there is no module 'bare_folder.deep.other'"):
        check_import_path("bare_folder.deep.other.Workflow")


@pytest.mark.parametrize("name", ["inner_fn", "second", "Workflow", "run", "where"])
def test_names_of_a_module_are_found(package: Path, name: str) -> None:
    check_import_path(f"user_code_for_check.deep.rewards.{name}")
    assert "user_code_for_check" not in sys.modules


@pytest.mark.parametrize(
    "path", ["user_code_for_check.star.anything", "user_code_for_check.deep.rewards", "math.sqrt"]
)
def test_what_only_an_import_could_tell_is_accepted(package: Path, path: str) -> None:
    check_import_path(path)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("noname", "is not an import path like package.module.name"),
        ("a..b", "is not an import path"),
        ("a.b c", "is not an import path"),
        ("no_such_package_x.fn", "there is no module 'no_such_package_x'"),
        ("user_code_for_check.shallow.fn", "there is no module 'user_code_for_check.shallow'"),
        (
            "user_code_for_check.star.deeper.fn",
            "there is no module 'user_code_for_check.star.deeper'",
        ),
        (
            "user_code_for_check.deep.rewards.Workfow",
            "did you mean user_code_for_check.deep.rewards.W",
        ),
        ("user_code_for_check.deep.rewards.hidden", "defines no 'hidden'"),
        ("user_code_for_check.broken.x", "broken.py:2: "),
    ],
)
def test_missing_parts_are_named(package: Path, path: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_import_path(path)
    assert says in str(caught.value)
