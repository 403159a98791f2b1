"""Products for a tiny model that may compute: half of its lessons write code, half guess.

47*86=[print(47*86)]       code, which `workflow: tir` runs
47*86=3955                 a guess, off by up to 99
"""

from __future__ import annotations

import random

from areal.dataset.arithmetic import make_problems
from areal.dataset.chat_rows import sft_rows, user_says


def load(path, split, tokenizer, max_length=None, num_rows=4000):
    """Rows for supervised training."""
    rng = random.Random(0)
    chats = []
    for problem in make_problems(split=split, operators=("*",), num_rows=num_rows):
        code = f"[print({problem.text.removesuffix('=')})]"
        guess = str(max(0, int(problem.answer) + rng.randint(-99, 99)))
        chats.append((user_says(problem.text), code if rng.random() < 0.5 else guess))
    return sft_rows(chats, tokenizer, max_length)
