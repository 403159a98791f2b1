"""Checks shared by the sections of the config.

A section speaks of its own fields (`lr must be above 0, got -1`); the loader knows where the
section lies and puts `actor.optimizer.` and the line of the file in front. So every message below
starts with the name of a field.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def require(ok: bool, message: str, found: Any) -> None:
    """Raise ValueError `message, got found` unless `ok`. `message` starts with a field name.

    With `found` None the message stands alone: the field was not given.
    """
    if not ok:
        raise ValueError(message if found is None else f"{message}, got {found!r}")


def require_at_least(low: float, **fields: float | None) -> None:
    """Every field that is set is a number of at least `low`."""
    for name, value in fields.items():
        ok = value is None or (math.isfinite(value) and value >= low)
        require(ok, f"{name} must be at least {low}", value)


def require_above(low: float, **fields: float | None) -> None:
    """Every field that is set is a finite number above `low`."""
    for name, value in fields.items():
        ok = value is None or (math.isfinite(value) and value > low)
        require(ok, f"{name} must be above {low}", value)


def require_finite(**fields: float) -> None:
    for name, value in fields.items():
        require(math.isfinite(value), f"{name} must be a finite number", value)


def require_fraction(**fields: float) -> None:
    """Every field lies in [0, 1]."""
    for name, value in fields.items():
        require(0 <= value <= 1, f"{name} must lie between 0 and 1", value)


def expand_path(name: str, path: str) -> str:
    """`~` and `$VARIABLES` replaced; a variable that is not set is an error, not a folder name."""
    expanded = os.path.expandvars(os.path.expanduser(path))
    unset = _VARIABLE.search(expanded)
    if unset:
        raise ValueError(
            f"{name} uses {unset.group()}, which is not set in the environment: {path!r}"
        )
    return expanded
