"""A small corpus of our own, questions that need two searches in it, and lessons for a tiny model.

corpus       one document per place     k7: code 4, near m3
question     code near k7?              the code of m3
"""

from __future__ import annotations

import random
import string

from areal.dataset.chat_rows import Rows, is_held_out, user_says, wants_held_out
from examples.lessons.dialogues import rows_of

PLACES = [letter + digit for letter in string.ascii_lowercase for digit in string.digits]
_rng = random.Random(0)  # the same world in every process
CODE = {place: _rng.choice(string.digits) for place in PLACES}
NEAR = {place: _rng.choice(PLACES) for place in PLACES}


def documents() -> list[tuple[str, str]]:
    """(title, text)"""
    return [(place, f"code {CODE[place]}, near {NEAR[place]}") for place in PLACES]


def found(place: str) -> str:
    """What a search for a place shows (search.py)."""
    return f"{place}: code {CODE[place]}, near {NEAR[place]}\n"


def problems(path, split, tokenizer, max_length=None, num_rows=None):
    """{"messages", "answer"}; the test split asks about places that training does not ask about."""
    held_out = wants_held_out(split)
    rows = [
        {"messages": user_says(f"code near {place}?"), "answer": CODE[NEAR[place]]}
        for place in PLACES
        if is_held_out(place) == held_out
    ]
    return Rows(rows[:num_rows])


def lessons(path, split, tokenizer, max_length=None, num_rows=8000):
    """A third guesses, a third answers after one search, a third searches twice."""
    rng = random.Random(1)
    asked = [place for place in PLACES if not is_held_out(place)]
    dialogues = []
    for number in range(num_rows):
        first = rng.choice(asked)
        # Invented neighbours and codes: the lesson is to read them, not to know them.
        second, codes = rng.choice(PLACES), rng.choices(string.digits, k=2)
        turns = [f"code near {first}?"]
        for place, code, near in [
            (first, codes[0], second),
            (second, codes[1], rng.choice(PLACES)),
        ][: number % 3]:
            turns += [f"search {place}", f"{place}: code {code}, near {near}\n"]
        answer = rng.choice(string.digits) if number % 3 == 0 else codes[number % 3 - 1]
        dialogues.append([*turns, answer])
    return rows_of(dialogues, tokenizer)
