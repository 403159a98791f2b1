"""Lessons for a tiny model at a terminal: half of its commands fit the task, half are any.

`questions` are the tasks by themselves, for examples/agents/online_grpo.yaml.
"""

from __future__ import annotations

import random

from areal.dataset.chat_rows import Rows, user_says
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


def questions(path, split, tokenizer, max_length=None, num_rows=None):
    """{"messages", "answer"}: a task, and the command that solves it."""
    rows = [{"messages": user_says(task + PROMPT), "answer": COMMANDS[task]} for task in COMMANDS]
    return Rows(rows[:num_rows])
