"""Text from code we do not trust, as every log, database and terminal takes it.

A lone surrogate (`\\ud83d`) cannot be written as UTF-8: SQLite, files and sockets raise on it. A
control character makes a terminal do things. Both are shown as the escapes Python would write.
"""

from __future__ import annotations

import re

_SURROGATES = re.compile(r"[\ud800-\udfff]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


def encodable(text: str) -> str:
    """`text` without lone surrogates."""
    return text if text.isascii() else _SURROGATES.sub(_escape, text)


def printable(text: str, max_chars: int | None = None) -> str:
    """`text` without control characters but tabs and new lines, cut where it is too long."""
    if max_chars is not None and len(text) > max_chars:
        text = text[:max_chars] + "..."
    return _UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
