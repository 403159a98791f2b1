"""Reading one field of a request body: its value when it is as expected, else a WireError.

A field that is null counts as left out, as in OpenAI's API.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from areal.openai.errors import WireError

_INT_END = 1 << 63
_REQUIRED = object()


class Fields:
    """The fields of one JSON object; remembers which ones nobody asked for."""

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, dict):
            raise WireError(400, f"{where or 'body'}: expected a JSON object, got {show(body)}")
        self._body = body
        self._where = f"{where}." if where else ""
        self.asked: set[str] = set()  # names, given or not

    def rest(self) -> dict[str, Any]:
        """What was given and not asked for."""
        return {name: v for name, v in self._body.items() if name not in self.asked}

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def any(self, name: str) -> Any:
        self.asked.add(name)
        return self._body.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def integer(
        self, name: str, default: Any, *, low: int = -_INT_END, high: int = _INT_END - 1
    ) -> Any:
        value = self.any(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer{_bounds(low, high)}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.any(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.any(name)
        if value is None and default is not _REQUIRED:
            return default
        if not is_text(value):
            raise self.wrong(name, "a text")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.any(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self.any(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value

    def wrong(self, name: str, expected: str) -> WireError:
        found = show(self._body[name]) if name in self._body else "nothing"
        param = f"{self._where}{name}"
        return WireError(400, f"{param}: expected {expected}, got {found}", param)


def _bounds(low: int, high: int) -> str:
    if high < _INT_END - 1:
        return f" from {low} to {high}"
    return f" of at least {low}" if low > -_INT_END else " of 64 bits"


def is_text(value: Any) -> TypeGuard[str]:
    """A string that can be written as UTF-8: JSON allows halves of characters, models do not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_token_ids(value: Any) -> TypeGuard[list[int]]:
    """A list of integers that can be token ids; checked by extremes, because prompts are long."""
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        return False
    return min(value) >= 0 and max(value) < 1 << 31


def show(value: Any) -> str:
    """A value as the caller would recognise it, never long."""
    if isinstance(value, int) and abs(value) >= _INT_END:
        return "an integer beyond 64 bits"
    try:
        text = ascii(value[:60] if isinstance(value, list | str) else value)
    except (ValueError, RecursionError):  # integers of thousands of digits, lists in lists in lists
        return f"a {type(value).__name__}"
    return f"{text[:60]}..." if len(text) > 60 else text
