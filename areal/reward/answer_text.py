r"""Extraction of the final answer from a text.

String operations only, in time linear in the text. A final answer is, in this order, the last
`\boxed{...}`, the text after the last `####`, or the last number or expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from areal.reward.arithmetic import MAX_CHARACTERS, NUMBER

# A minus directly after a digit or a bracket is a subtraction, not a sign.
_LAST_NUMBER = re.compile(rf"(?:(?<![\d.)\]}}])-)?(?:{NUMBER})")
_PLAIN = re.compile(rf"[-+]?(?:{NUMBER})")
_BRACES = re.compile(r"\\boxed\{|[{}]")

# Tokens of an expression, in plain text and in LaTeX. Anything else ends it: words, line ends,
# `=`, `$`.
_PIECE = re.compile(
    rf"(?P<number>{NUMBER}|\\pi(?![a-zA-Z]))"
    r"|(?P<operator>\*\*|[-+*/^×÷·]|\\(?:cdot|times|div)(?![a-zA-Z]))"
    r"|(?P<command>\\(?:[dt]?frac|sqrt(?:\[\d+\])?|left|right)(?![a-zA-Z]))"
    r"|(?P<open>[({])|(?P<close>[)}])|(?P<percent>\\?%)|(?P<space>[ \t]+)"
    r"|(?P<currency>\\?[$€£¥](?=\.?\d))|(?P<other>[^\s\d.,+\-*/^(){}\\%×÷·$€£¥]+|.)",
    re.DOTALL,
)
_PAIRS = {")": "(", "}": "{"}
# An integer at the very end, after a character that no expression contains: the most common answer,
# found in a tenth of the time.
_PLAIN_END = re.compile(r"[^\s\d.,+\-*/^(){}\\%×÷·$€£¥](-?\d+)\Z")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}\d]*\}(?:\^\{?\d\}?)?")  # \text{ cm}^2


def final_answer(text: str) -> str | None:
    """The marked answer, or the last number if none is marked; None if there is neither."""
    marked = marked_answer(text)
    return marked if marked is not None else last_number(text)


def marked_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, else the rest of the line after the last `####`."""
    boxed = last_boxed(text)
    return boxed if boxed is not None else after_hashes(text)


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`, where GSM8K has its answers."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() or None if mark else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance."""
    opened: list[re.Match[str]] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match.group() != "}":
            opened.append(match)
        elif opened:
            start = opened.pop()
            if start.group() != "{" and (last is None or start.end() > last[0]):
                last = start.end(), match.start()
    return None if last is None else text[slice(*last)].strip()


def last_bracketed(text: str) -> str | None:
    """Content of the last `[...]` that holds no other brackets."""
    contents = re.findall(r"\[([^\[\]]*)\]", text)
    return contents[-1].strip() if contents else None


def last_number(text: str) -> str | None:
    numbers = _LAST_NUMBER.findall(_around_last_number(text))
    return numbers[-1] if numbers else None


def plain_number(text: str) -> Decimal | None:
    """The value of a text that is one decimal number, optionally with `$`, `%` or commas."""
    bare = bare_text(text).rstrip("%").strip()
    return Decimal(bare.replace(",", "")) if _PLAIN.fullmatch(bare) else None


def bare_text(text: str) -> str:
    """Without `$`, backslashes before symbols, and a trailing full stop."""
    return re.sub(r"\\(?=[%$ ,!])", "", text).replace("$", "").strip().rstrip(".").strip()


def last_expression(text: str) -> str | None:
    r"""The last number with the arithmetic around it: `3+2`, `1/2`, `\frac{1}{2}`, `50%`.

    A number that follows another without an operator starts a new expression.
    """
    if plain := _PLAIN_END.search(text, len(text) - 32 if len(text) > 32 else 0):
        return plain[1]
    text = _around_last_number(text).replace("{,}", ",")  # LaTeX's thousands separator
    runs = list(_runs(_UNIT.sub("\n", text)))
    return _trimmed(runs[-1]) if runs else None


def _around_last_number(text: str) -> str:
    """The part of the text that an answer at its last number can span; "" without a number."""
    last = next((i for i in range(len(text) - 1, -1, -1) if text[i].isdecimal()), -1)
    last = max(last, text.rfind("\\pi"))
    return "" if last < 0 else text[max(0, last - MAX_CHARACTERS) : last + MAX_CHARACTERS]


def _runs(text: str) -> Iterator[list[re.Match[str]]]:
    """Runs of consecutive expression tokens that contain a number."""
    run: list[re.Match[str]] = []
    for piece in _PIECE.finditer(text):
        kind, before = piece.lastgroup, run[-1].lastgroup if run else None
        if kind in ("space", "currency"):
            continue
        # 2\pi and 2(3) are products, `2 3` and `1) 5` are not.
        starts_anew = piece.group()[0].isdecimal() and (
            before in ("number", "percent") or (before == "close" and run[-1].group() == ")")
        )
        if kind == "other" or starts_anew:
            if _has_number(run):
                yield run
            run = []
        if kind != "other":
            run.append(piece)
    if _has_number(run):
        yield run


def _has_number(run: list[re.Match[str]]) -> bool:
    """`^2` after a letter (m^2) does not count."""
    return any(piece.lastgroup == "number" for piece in run) and run[0].group() != "^"


def _trimmed(run: list[re.Match[str]]) -> str:
    """Without unmatched tokens: brackets of the sentence, dangling operators, bullets."""
    paired = _paired(run)
    first, end = 0, len(run)
    while first < end and _dangles(run[end - 1], paired):
        end -= 1
    while first < end and (_dangles(run[first], paired) and not _is_sign(run, first)):
        first += 1
    return "".join(piece.group() for piece in run[first:end])


def _paired(run: list[re.Match[str]]) -> set[int]:
    """Positions of the brackets that have a match in the run."""
    opened: list[re.Match[str]] = []
    paired: set[int] = set()
    for piece in run:
        if piece.lastgroup == "open":
            opened.append(piece)
        elif opened and opened[-1].group() == _PAIRS.get(piece.group()):
            paired |= {opened.pop().start(), piece.start()}
    return paired


def _dangles(piece: re.Match[str], paired: set[int]) -> bool:
    """Whether it is meaningless at the edge of an expression."""
    if piece.lastgroup in ("open", "close"):
        return piece.start() not in paired
    return piece.lastgroup == "operator"


def _is_sign(run: list[re.Match[str]], place: int) -> bool:
    """A minus directly before its number or its currency sign; `- 5` is a list item."""
    piece = run[place]
    between = piece.string[piece.end() : run[place + 1].start()] if place + 1 < len(run) else " "
    return piece.group() == "-" and not between.strip("\\$€£¥")
