"""A text game: find a number from 1 to 7 in three guesses, told each time whether it is higher."""

from __future__ import annotations

import random
import re


class Guess:
    """Halving finds every number, so that the best play is worth 1."""

    def __init__(self, num_guesses: int = 3) -> None:
        self.left = num_guesses

    async def reset(self, row):
        self.number = random.Random(row["seed"]).randint(1, 7)
        return "guess 1-7:"

    async def step(self, action):
        self.left -= 1
        found = re.search(r"[1-7]", action)
        if found and int(found[0]) == self.number:
            return "", 1.0, True
        if self.left == 0 or not found:  # out of guesses, or no number of the game
            return "", 0.0, True
        return "higher:" if self.number > int(found[0]) else "lower:", 0.0, False
