"""Rate-limited relay of what sandbox workers print to our standard error.

In: the bytes of a worker's pipe. Out: whole lines, redacted and without control characters.
Workers hold neither a terminal nor a log file of the run, so they can neither fill nor alter one.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys

from areal.api.redact import hide_secrets

BURST_BYTES = 1 << 20
BYTES_PER_S = 64 << 10  # refill rate of the burst budget
_LINE_BYTES = 8192  # longer lines are split
_READ_BYTES = 1 << 16
_LAST_READS = 16
# A lone surrogate cannot be encoded as UTF-8; control characters drive terminals.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


def printable(text: str, max_chars: int | None = None) -> str:
    """`text` with characters unfit for logs and terminals escaped as Python escapes them (except
    tabs and newlines), cut at `max_chars`."""
    if max_chars is not None and len(text) > max_chars:
        text = text[:max_chars] + "..."
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class OutputRelay:
    """One per reward function: its workers share the rate limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = float(BURST_BYTES)
        self._counted_at: float | None = None
        self._dropped = 0
        self._begun: dict[int, bytes] = {}  # pipe -> its incomplete last line

    @property
    def is_dropping(self) -> bool:
        return self._dropped > 0

    def read(self, pipe: int, now: float) -> bool:
        """Relay what is available; False at the end of the pipe."""
        data = _read(pipe)
        if data:
            self._take(pipe, data, now)
        return data != b""

    def read_last(self, pipe: int, now: float) -> None:
        """Relay what a dead process left in its pipe, which a child of it may hold open."""
        for _ in range(_LAST_READS):
            if not (data := _read(pipe)):
                break
            self._take(pipe, data, now)
        if rest := self._begun.pop(pipe, b""):
            self._pass_on(rest)

    def _take(self, pipe: int, data: bytes, now: float) -> None:
        self._refill(now)
        *lines, rest = (self._begun.pop(pipe, b"") + data).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            self._begun[pipe] = rest
        for line in lines:
            self._pass_on(line)

    def _refill(self, now: float) -> None:
        if self._counted_at is not None:
            gained = (now - self._counted_at) * BYTES_PER_S
            self._left = min(self._left + gained, float(BURST_BYTES))
        self._counted_at = now

    def _pass_on(self, line: bytes) -> None:
        size = len(line) + 1
        if size > self._left:
            if not self._dropped:
                _write(f"[{self._name} prints too much; what follows is dropped]")
            self._dropped += size
            return
        if self._dropped:
            _write(f"[{self._dropped} bytes that {self._name} printed were dropped]")
            self._dropped = 0
        self._left -= size
        _write(printable(hide_secrets(line.decode(errors="backslashreplace"))))


def _read(pipe: int) -> bytes | None:
    """None when nothing is available now, empty at the end of the pipe."""
    try:
        return os.read(pipe, _READ_BYTES)
    except BlockingIOError:
        return None


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
