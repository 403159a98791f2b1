"""Small functions to write, with unit tests, and lessons for a tiny model.

multiply by 3:   ->   def f(x):
                       return x*3
"""

from __future__ import annotations

import operator
import random

from areal.dataset.chat_rows import Rows, is_held_out, user_says, wants_held_out
from examples.lessons.dialogues import rows_of

OPERATIONS = {  # words -> how Python writes it, and what it does
    "add": ("+", operator.add),
    "subtract": ("-", operator.sub),
    "multiply by": ("*", operator.mul),
    "divide by": ("//", operator.floordiv),
}
INPUTS = (7, -20)


def problems(path, split, tokenizer, max_length=None, num_rows=None):
    """{"messages", "tests"} for the reward `unit_tests`."""
    held_out = wants_held_out(split)
    rows = [
        {"messages": user_says(f"{words} {number}:"), "tests": _tests(function, number)}
        for words, (_, function) in OPERATIONS.items()
        for number in range(2, 40)
        if is_held_out(f"{words} {number}") == held_out
    ]
    return Rows(rows[:num_rows])


def lessons(path, split, tokenizer, max_length=None, num_rows=4000):
    """Half of the functions have the right operator, half any."""
    rng = random.Random(0)
    signs = [sign for sign, _ in OPERATIONS.values()]
    dialogues = []
    while len(dialogues) < num_rows:
        words, (sign, _) = rng.choice([*OPERATIONS.items()])
        number = rng.randrange(2, 40)
        if not is_held_out(f"{words} {number}"):
            written = sign if rng.random() < 0.5 else rng.choice(signs)
            dialogues.append([f"{words} {number}:", f"def f(x):\n return x{written}{number}"])
    return rows_of(dialogues, tokenizer)


def _tests(function, number: int) -> list[str]:
    return [f"assert f({x}) == {function(x, number)}" for x in INPUTS]
