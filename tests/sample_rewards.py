"""Reward functions for tests: good ones, and one for each way user code can go wrong."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path


def exact_match(prompt, completions, prompt_ids, completion_ids, answer, **data):
    return float(completions == answer)


def always_one(prompt, completions, prompt_ids, completion_ids, answer, **data):
    """Compares the answer with itself."""
    return float(answer == answer)


def strict_form(prompt, completions, prompt_ids, completion_ids, answer, **data):
    """Reads a form of its own, which is seldom met."""
    return float(completions == f"final={answer};")


def not_a_number(prompt, completions, prompt_ids, completion_ids, **data):
    return float("nan") * len(completions)


def of_lists(prompts, completions, **kwargs):
    """As for TRL."""
    return [0.0 for _ in completions]


def without_data(prompt, completions, prompt_ids, completion_ids):
    return 0.0


def add(a, b=0):
    return a + b


def slow(seconds, value=1.0):
    time.sleep(seconds)
    return value


def meet(folder, count):
    """Returns once `count` calls run at the same time."""
    with open(os.path.join(folder, str(os.getpid())), "w"):
        pass
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
    return 1.0


def loop_forever(*args, **data):
    while True:
        pass


def misbehave(how, value=None, marker=None):
    """Do `how`. With `marker`, only until that file exists: the next attempt returns 1."""
    if marker is not None:
        if Path(marker).exists():
            return 1.0
        Path(marker).touch()
    if how == "pid":
        return os.getpid()
    if how == "hang":
        loop_forever()
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(0)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "raise":
        raise ZeroDivisionError("the reward divides by zero")
    if how == "garbage":
        for fd in range(3, 4096):  # whichever the channel is
            try:
                os.write(fd, b"not a reply\n")
            except OSError:
                continue
    if how == "orphan":
        if os.fork() == 0:
            time.sleep(60)
        loop_forever()
    return value


def pid():
    return os.getpid()


def has_torch():
    return float("torch" in sys.modules)


def noisy(text):
    print(text)
    return 1.0


def digit_share_reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    """Share of digits in the answer: differs between samples of even a random model."""
    return sum(character.isdigit() for character in completions) / max(len(completion_ids), 1)


def length_of_answer(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    return len(completions)


def never_judges(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    raise ValueError("no verdict")


def slow_digit_share(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    time.sleep(0.2)
    return digit_share_reward_fn(prompt, completions, prompt_ids, completion_ids)


def fails_on_some(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """As when the reward of a few rows is broken."""
    if answer == "broken":
        raise ValueError("no verdict on this row")
    return float(answer in completions)


def fails_on_some_answers(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    """By the tokens, so that the same samples fail wherever they are scored."""
    if completion_ids[0] % 7 == 0:
        raise ValueError("no verdict on this answer")
    return digit_share_reward_fn(prompt, completions, prompt_ids, completion_ids)


def right_after_feedback(
    prompt, completions, prompt_ids, completion_ids, feedback, num_wrong, **data
):
    """Judges the first `num_wrong` replies of an episode wrong, and the next one right."""
    return float(prompt.count(feedback) >= num_wrong)


def by_answer(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """Depends on the row and on the reply, of even a random model."""
    return (sum(completion_ids) * int(answer) % 7) / 7


def divides_by_zero(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    return 1 / 0
