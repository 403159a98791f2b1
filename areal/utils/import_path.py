"""Functions and classes by name: `load("package.module.name")`, and `load_named` for the table of a
package door.

A user writes a short name or an import path in the YAML; every mistake comes back as one ValueError
that starts with the config key, so it can be shown as it is.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any


def load_named(name: str, table: Mapping[str, str], *, key: str) -> Any:
    """The object `name` stands for in `table` ({short name: import path}), or an import path."""
    if name in table:
        return load(table[name], key=key)
    if "." not in name:
        known = ", ".join(sorted(table))
        raise ValueError(
            f"{key}: unknown name {name!r}{_suggestion(name, table)}; expected one of {known}, "
            "or an import path 'package.module.name'"
        )
    return load(name, key=key)


def load(path: str, *, key: str) -> Any:
    """The function or class `package.module.name`. Errors begin with the config key `key`."""
    found = load_object(path, key=key)
    if not callable(found):
        raise ValueError(f"{key}: {path!r} is {found!r:.200}, expected a function or a class")
    return found


def load_object(path: str, *, key: str) -> Any:
    """Whatever `package.module.name` is."""
    module_name, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in path.split(".")) or not module_name:
        raise ValueError(f"{key}: expected an import path 'package.module.name', got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code runs here: whatever it raises is why it does not import
        raise ValueError(
            f"{key}: cannot import {path!r}: {type(error).__name__}: {error}; check the path, and "
            "that its folder is on PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        suggestion = _suggestion(name, [n for n in vars(module) if not n.startswith("_")])
        raise ValueError(f"{key}: module {module_name!r} has no {name!r}{suggestion}")
    return getattr(module, name)


def _suggestion(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
