"""Text that arrives in pieces, read by grammars that may run out of it at any character.

A grammar is a generator: it reads with `yield from cursor.until(...)`, and a bare `yield` reaches
the driver when more text is needed. What a grammar reads does not depend on how the text was cut.
It raises NotACall as soon as no continuation can make the text a call.

Every method resumes its search where it stopped, so reading costs linear time in any cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from areal.api.json_text import loads_written

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]

_MAX_DEPTH = 200  # nesting of JSON, as in api/json_text.py
_SPACE = re.compile(r"\s*")
# Within JSON, outside of strings and brackets.
_PLAIN = re.compile(r"[0-9A-Za-z+\-.:, \t\r\n]*")
_IN_STRING = {
    quote: re.compile(rf"(?:[^{quote}\\\x00-\x08\x0a-\x1f]+|\\[^\x00-\x1f])*+")
    for quote in ('"', "'")
}


class NotACall(Exception):
    """The text is not a tool call, whatever follows."""


class Cursor:
    def __init__(self) -> None:
        self.text = ""
        self.pos = 0  # everything before it was read
        self.is_final = False  # no more text will come

    def feed(self, piece: str) -> None:
        # Appending to the only reference of a string takes no copy.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def forget(self) -> None:
        """Drop the text that was read. Invalidates remembered positions."""
        self.text = self.text[self.pos :]
        self.pos = 0

    def more(self) -> Reading[None]:
        """Wait for more text; NotACall if there is none."""
        if self.is_final:
            raise NotACall
        yield

    def peek(self) -> Reading[str]:
        """The next character; empty at the end of the text."""
        while self.pos == len(self.text) and not self.is_final:
            yield
        return self.text[self.pos : self.pos + 1]

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> Reading[None]:
        """Read what matches `pattern`, a repeated class of characters; by default white space."""
        while True:
            found = pattern.match(self.text, self.pos)
            self.pos = found.end() if found else self.pos
            if self.pos < len(self.text) or self.is_final:
                return
            yield

    def literal(self, word: str) -> Reading[bool]:
        """Read `word` if it comes next."""
        while len(self.text) - self.pos < len(word) and word.startswith(self.text[self.pos :]):
            if self.is_final:
                return False
            yield
        if not self.text.startswith(word, self.pos):
            return False
        self.pos += len(word)
        return True

    def expect(self, word: str) -> Reading[None]:
        if not (yield from self.literal(word)):
            raise NotACall

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read a match of `pattern`: any prefix of a match is one, and its length is bounded."""
        while True:
            found = pattern.match(self.text, self.pos)
            if not found and self.pos < len(self.text):
                raise NotACall
            if found and (found.end() < len(self.text) or self.is_final):
                self.pos = found.end()
                return found[0]
            yield from self.more()

    def until(self, word: str, limit: int | None = None) -> Reading[str]:
        """Read up to and including `word`; returns what stands before it, at most `limit` long."""
        begin = search = self.pos
        end = None if limit is None else begin + limit + len(word)
        while (at := self.text.find(word, search, end)) < 0:
            if end is not None and len(self.text) >= end:
                raise NotACall
            search = max(begin, len(self.text) - len(word) + 1)
            yield from self.more()
        self.pos = at + len(word)
        return self.text[begin:at]

    def json(self) -> Reading[Any]:
        """Read white space and a JSON object or list."""
        yield from self.skip()
        if (yield from self.peek()) not in ("{", "["):
            raise NotACall
        begin, depth = self.pos, 0
        while True:
            yield from self.skip(_PLAIN)
            match (yield from self.peek()):
                case '"':
                    yield from self.string('"')
                    continue
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
                case _:
                    raise NotACall
            self.pos += 1
            if depth == 0:
                break
            if depth > _MAX_DEPTH:
                raise NotACall
        try:
            return loads_written(self.text[begin : self.pos])
        except ValueError:
            raise NotACall from None

    def string(self, quote: str) -> Reading[str]:
        """Read a quoted string with backslash escapes; returns it without quotes, still escaped."""
        self.pos += 1
        begin = self.pos
        while True:
            found = _IN_STRING[quote].match(self.text, self.pos)
            self.pos = found.end() if found else self.pos
            if self.text.startswith(quote, self.pos):
                break
            if len(self.text) - self.pos > (self.text[self.pos : self.pos + 1] == "\\"):
                raise NotACall  # a control character
            yield from self.more()
        self.pos += 1
        return self.text[begin : self.pos - 1]
