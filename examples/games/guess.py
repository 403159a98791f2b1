"""A text game: find a number in few guesses, told each time whether it is higher."""

from __future__ import annotations

import random
import re


class Guess:
    """Halving finds each of 7 numbers in three guesses, of 127 in seven: best play is worth 1."""

    def __init__(self, biggest: int = 7, num_guesses: int = 3, instructions: str = "") -> None:
        self.biggest, self.left, self.instructions = biggest, num_guesses, instructions

    async def reset(self, row):
        self.number = random.Random(row["seed"]).randint(1, self.biggest)
        return f"{self.instructions}\n\nguess 1-{self.biggest}:".strip()

    async def step(self, action):
        self.left -= 1
        found = re.search(r"[1-9]\d*", action)
        guess = int(found[0][: len(str(self.biggest))]) if found else 0
        if guess == self.number:
            return "", 1.0, True
        if self.left == 0 or not 0 < guess <= self.biggest:  # or no number of the game
            return "", 0.0, True
        return "higher:" if self.number > guess else "lower:", 0.0, False
