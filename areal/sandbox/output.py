"""What reward workers print, passed on to our standard error within a bound.

In: the bytes of a worker's pipe. Out: whole lines without secrets and control characters. A worker
holds no terminal and no log of the run, so it can neither fill nor change one.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys

from areal.api.redact import hide_secrets

BURST_BYTES = 1 << 20
BYTES_PER_S = 64 << 10  # that the burst grows back by
_LINE_BYTES = 8192  # longer ones are cut in two
_READ_BYTES = 1 << 16
_LAST_READS = 16
# A lone surrogate cannot be written as UTF-8, a control character makes a terminal do things.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


def printable(text: str, max_chars: int | None = None) -> str:
    """`text` with the escapes Python would write for what no log or terminal takes, tabs and new
    lines excepted, cut where it is too long."""
    if max_chars is not None and len(text) > max_chars:
        text = text[:max_chars] + "..."
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class OutputRelay:
    """Of all workers of one function: they share the bound."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = float(BURST_BYTES)
        self._counted_at: float | None = None
        self._dropped = 0
        self._begun: dict[int, bytes] = {}  # the last line of a pipe, while it has no end

    @property
    def is_dropping(self) -> bool:
        return self._dropped > 0

    def read(self, pipe: int, now: float) -> bool:
        """Passes on what is there; False when the pipe has ended."""
        data = _read(pipe)
        if data:
            self._take(pipe, data, now)
        return data != b""

    def read_last(self, pipe: int, now: float) -> None:
        """What a process that is gone has left in its pipe, which another may hold open."""
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
    """None when nothing is there now, empty when nothing will be."""
    try:
        return os.read(pipe, _READ_BYTES)
    except BlockingIOError:
        return None


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens: closed, none
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
