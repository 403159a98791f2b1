"""Lessons for a tiny model at a terminal: half of its commands fit the task, half are any."""

from __future__ import annotations

import random

from examples.lessons.dialogues import rows_of
from examples.terminal.terminal import PROMPT

COMMANDS = {
    "copy a to b": "cp a b",
    "rename a to b": "mv a b",
    "remove a": "rm a",
    "sort a into b": "sort a>b",
    "count lines of a into b": "wc -l a>b",
    "last line of a into b": "tail -1 a>b",
}


def load(path, split, tokenizer, max_length=None, num_rows=4000):
    """Rows for supervised training."""
    rng = random.Random(0)
    dialogues = []
    for number in range(num_rows):
        task, command = rng.choice([*COMMANDS.items()])
        if number % 2:
            command = rng.choice([*COMMANDS.values()])
        dialogues.append([task + PROMPT, command, PROMPT, "exit"])
    return rows_of(dialogues, tokenizer)
