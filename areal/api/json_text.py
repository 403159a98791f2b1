"""Text and JSON at the boundaries of a process: requests, replies, files, model output.

    loads(data)           strict: for requests, and replies of servers
    loads_written(text)   for JSON written by a model
    dumps(value)          for replies and stored text
    well_formed(text)     for any other text that is encoded, logged or stored

Python strings and JSON escapes can hold lone surrogates (half of a UTF-16 pair), which cannot be
encoded; JSON numbers can exceed a double. `loads` rejects both and names the field. In text that
leaves this process, and in model text, U+FFFD replaces a lone surrogate.

Limits of `loads`: numbers, also integers, must be finite as doubles; 200 levels of nesting. NaN and
Infinity are not JSON. Of duplicate keys the last one counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from pydantic_core import from_json

# What `loads` returns, and `dumps` takes.
Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"

_NUMBER_END = 10**308  # every integer below is finite as a double
_MAX_SEARCHED = 1 << 20  # bytes of malformed JSON searched for the offending field
_SCALARS = {str, bool, type(None)}
# One escape sequence. A surrogate pair is one character, a lone surrogate is none.
_ESCAPE = re.compile(
    r"\\(?:(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


class JsonError(ValueError):
    """`field` is the position of the error, as `messages[0].content`; empty for the whole."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field


def loads(data: bytes | str, where: str = "", *, check_numbers: bool = True) -> Any:
    """JsonError unless it is JSON within the limits; `where` names the whole value.

    check_numbers=False: the caller checks numbers per field; most are in long lists.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        field = _surrogate_field(data)
        if field is None:
            raise JsonError(where, f"not JSON ({str(error)[:100]})") from None
        reason = "expected text, got a lone surrogate (half of a UTF-16 pair)"
        raise JsonError(field or where, reason) from None
    if check_numbers and (path := _path_of(value, _is_infinite)) is not None:
        reason = "expected a finite number of at most 308 digits"
        raise JsonError(field_name(path) or where, reason)
    return value


def loads_object(
    data: bytes | str, where: str = "body", *, check_numbers: bool = True
) -> dict[str, Any]:
    """The JSON object in `data`, or JsonError."""
    value: Json = loads(data, where, check_numbers=check_numbers)
    if not isinstance(value, dict):
        raise JsonError(where, f"expected a JSON object, got {type(value).__name__}")
    return value


def loads_written(text: str) -> Any:
    """JsonError unless it is JSON within the limits."""
    text = well_formed(text)
    return loads(_ESCAPE.sub(_whole_escape, text) if "\\u" in text else text)


def dumps(value: Any) -> str:
    """The result can be encoded as UTF-8. ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return well_formed(text)


def well_formed(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, so that it can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _whole_escape(match: re.Match[str]) -> str:
    return r"\ufffd" if match[2] else match[0]


def _surrogate_field(data: bytes | str) -> str | None:
    """Position of the lone surrogate that made `data` malformed; None if the cause is another."""
    if len(data) > _MAX_SEARCHED or not _may_hold_surrogate(data):
        return None
    try:
        path = _path_of(json.loads(data), _has_surrogate)
    except (ValueError, RecursionError):
        return None
    return None if path is None else field_name(path)


def _may_hold_surrogate(data: bytes | str) -> bool:
    if isinstance(data, str):
        return "\\u" in data or well_formed(data) is not data
    return b"\\u" in data or b"\xed" in data  # UTF-8's first byte of a surrogate


def _path_of(
    value: Json, is_bad: Callable[[Json], bool], path: tuple[str | int, ...] = ()
) -> tuple[str | int, ...] | None:
    """Path to the first bad scalar."""
    if isinstance(value, dict):
        for key, item in value.items():
            if is_bad(key):
                return path
            if (found := _path_of(item, is_bad, (*path, key))) is not None:
                return found
    elif isinstance(value, list):
        if is_bad is _is_infinite and _is_fine(value):
            return None
        for index, item in enumerate(value):
            if (found := _path_of(item, is_bad, (*path, index))) is not None:
                return found
    elif is_bad(value):
        return path
    return None


def _is_fine(items: list[Any]) -> bool:
    """Fast path for long lists of token ids and log-probabilities; False means "check each"."""
    kinds = set(map(type, items))
    if kinds <= _SCALARS:
        return True
    if kinds == {int}:
        return min(items) > -_NUMBER_END and max(items) < _NUMBER_END
    return kinds == {float} and math.isfinite(sum(items))


def _is_infinite(value: Json) -> bool:
    if type(value) is int:
        return not -_NUMBER_END < value < _NUMBER_END
    return type(value) is float and not math.isfinite(value)


def _has_surrogate(value: Json) -> bool:
    return isinstance(value, str) and well_formed(value) is not value


def field_name(path: tuple[str | int, ...]) -> str:
    """A path of keys and indices as it is written in errors: `messages[0].content`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return well_formed("".join(parts).removeprefix("."))[:200]
