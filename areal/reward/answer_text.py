r"""Find the final answer in a text, and compare plain numbers without any algebra.

Pure string work. A final answer is, in this order, the last `\boxed{...}`, what follows the last
`####`, or the last number.
"""

from __future__ import annotations

import re
from decimal import Decimal

# 1,234,567.5 or 12 or 0.5 or .5. A minus directly after a digit or a bracket subtracts: no sign.
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_LAST_NUMBER = re.compile(rf"(?:(?<![\d.)\]}}])-)?(?:{_NUMBER})")
_PLAIN = re.compile(rf"[-+]?(?:{_NUMBER})")


def final_answer(text: str) -> str | None:
    """The marked answer, or the last number when none is marked; None when there is neither."""
    marked = marked_answer(text)
    return marked if marked is not None else last_number(text)


def marked_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, else the rest of the line after the last `####`."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() or None if mark else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin:end].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def last_bracketed(text: str) -> str | None:
    """Content of the last `[...]` that holds no other brackets."""
    contents = re.findall(r"\[([^\[\]]*)\]", text)
    return contents[-1].strip() if contents else None


def last_number(text: str) -> str | None:
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def plain_number(text: str) -> Decimal | None:
    """The value of a text that is one decimal number, perhaps with `$`, `%` or thousands commas."""
    bare = text.replace("\\", "").replace("$", "").strip().rstrip(".%").strip()
    return Decimal(bare.replace(",", "")) if _PLAIN.fullmatch(bare) else None
