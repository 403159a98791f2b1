"""Reward for countdown: 1 for an expression that makes the target, 0.1 for a legal one that misses.

Legal means: only numbers, + - * / and brackets, with each of the row's `nums` used exactly once.
The expression is the content of the last `<answer>...</answer>`, or else the last line, without a
part after `=`. It is parsed, never evaluated as code, and computed in exact fractions.
"""

from __future__ import annotations

import ast
import operator
from fractions import Fraction
from typing import Any

LEGAL_BUT_WRONG = 0.1  # the rules are learned before the target is hit
MAX_CHARACTERS = 200

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    answer: str,
    nums: list[int],
    **data: Any,
) -> float:
    try:
        used: list[int] = []
        value = _value(_parse(find_expression(completions)), used)
    except (NotAnExpression, ZeroDivisionError):
        return 0.0
    if sorted(used) != sorted(int(number) for number in nums):
        return 0.0
    return 1.0 if value == int(answer) else LEGAL_BUT_WRONG


def find_expression(text: str) -> str:
    before, tag, rest = text.rpartition("<answer>")
    if tag:
        text = rest.partition("</answer>")[0]
    lines = text.strip().splitlines()
    return lines[-1].partition("=")[0].strip() if lines else ""


class NotAnExpression(Exception):
    """The text contains something other than numbers, operators and brackets."""


def _parse(text: str) -> ast.expr:
    # The bound protects the parser's stack from thousands of nested brackets.
    if not text or len(text) > MAX_CHARACTERS:
        raise NotAnExpression
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:
        raise NotAnExpression from error


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The node's value; its numbers are appended to `used`."""
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, used), _value(right, used))
    raise NotAnExpression
