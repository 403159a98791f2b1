"""Names and import paths, and what is said when they are wrong."""

from __future__ import annotations

import math

import pytest

from areal.utils.import_path import load, load_named

TABLE = {"root": "math.sqrt"}


def test_load_and_load_named():
    assert load("math.sqrt", key="fn") is math.sqrt
    assert load_named("root", TABLE, key="fn") is math.sqrt
    assert load_named("math.sqrt", TABLE, key="fn") is math.sqrt


@pytest.mark.parametrize(
    "path, message",
    [
        ("sqrt", "fn: expected an import path 'package.module.name', got 'sqrt'"),
        ("math.sq rt", "got 'math.sq rt'"),
        (".math.sqrt", "expected an import path"),
        ("", "expected an import path"),
        ("math.sqrtt", r"fn: module 'math' has no 'sqrtt' \(did you mean 'sqrt'\?\)"),
        ("no_such_package.fn", "cannot import 'no_such_package.fn': ModuleNotFoundError"),
    ],
)
def test_bad_paths(path, message):
    with pytest.raises(ValueError, match=message):
        load(path, key="fn")


def test_the_error_inside_a_users_module_is_the_cause(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero") as caught:
        load("broken_module.fn", key="fn")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"fn: unknown name 'rot' \(did you mean 'root'\?\)"):
        load_named("rot", TABLE, key="fn")
