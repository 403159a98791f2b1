"""docs/metrics.md as a list of names, to compare with what code and runs record.

`actor/entropy/avg` stands for its `/min` and `/max` too, a word in capitals for whatever varies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `([\w/-]+)` ", re.MULTILINE)


def documented() -> list[str]:
    return _ROW.findall(PAGE.read_text(encoding="utf-8"))


def undocumented(recorded: Iterable[str]) -> list[str]:
    """The recorded statistics that the page does not name."""
    known = re.compile("|".join(map(_pattern, documented())))
    return sorted(name for name in set(recorded) if not known.fullmatch(name))


def _pattern(name: str) -> str:
    return re.sub(r"\b[A-Z]+\b", ".+", name).replace("/avg", "/(?:avg|min|max)")
