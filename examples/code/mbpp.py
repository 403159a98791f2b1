"""MBPP: short Python problems with tests, in the shape of the reward `unit_tests`."""

from __future__ import annotations

from areal.dataset.chat_rows import drop_long_prompts, user_says
from areal.dataset.source_files import read_rows

ASK = "{text}\nReply with a Python function in one code block. It must pass this test:\n{test}"


def load(path, split, tokenizer, max_length=None):
    """{"messages", "tests"}; the model is shown the first test, which has the function's name."""
    rows = read_rows(path, split=split, columns=("text", "test_list"))
    chats = [
        {
            "messages": user_says(ASK.format(text=row["text"], test=row["test_list"][0])),
            "tests": list(row["test_list"]),
        }
        for row in rows
    ]
    return drop_long_prompts(chats, tokenizer, max_length)
