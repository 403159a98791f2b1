"""Reward functions of the wrong kind, and values and errors nobody expects."""

from __future__ import annotations

import decimal
import fcntl
import fractions
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from sample_rewards import digit_share_reward_fn


def trl_style(prompts, completions, **kwargs):
    return [1.0 for _ in completions]


def without_data(prompt, completions, prompt_ids, completion_ids):
    return 1.0


async def coroutine(prompt, completions, prompt_ids, completion_ids, **data):
    return 1.0


def returns_list(prompt, completions, prompt_ids, completion_ids, **data):
    return [1.0]


def wrong_inside(prompt, completions, prompt_ids, completion_ids, **data):
    return without_data(prompt)


def reads_environment(*args, **data):
    return float(os.environ["MY_SERVICE_URL"])


class Rude(float):
    def __repr__(self):
        raise RuntimeError("not for you")


class Huge(float):
    def __repr__(self):
        return "x" * 10_000_000


class Silent:
    """No number, and not to be shown."""

    def __repr__(self):
        raise RuntimeError("not for you")


class UnshowableError(Exception):
    def __str__(self):
        raise RuntimeError("not for you")


class HugeError(Exception):
    def __str__(self):
        return "y" * 10_000_000


class NotAFloat(float):
    def __float__(self):
        return "text"


VALUES = {
    "decimal": decimal.Decimal("0.25"),
    "fraction": fractions.Fraction(1, 4),
    "huge int": 10**400,
    "unshowable int": 10**6000,
    "huge decimal": decimal.Decimal("1e999"),
    "rude": Rude(0.25),
    "huge": Huge(0.25),
    "not a float": NotAFloat(0.25),
    "silent": Silent(),
    "complex": 1 + 2j,
    "text": "\ud83d",
}


def give(what):
    if what.startswith("numpy"):
        import numpy as np

        return {
            "numpy float": np.float32(0.25),
            "numpy int": np.int64(1),
            "numpy bool": np.bool_(True),
            "numpy scalar array": np.array(0.25),
            "numpy array": np.array([0.25]),
            "numpy text": np.str_("1.0"),
        }[what]
    return VALUES[what]


def fail(what):
    """Raise something that no log, database or terminal would take as it is."""
    if what == "unshowable":
        raise UnshowableError
    if what == "huge":
        raise HugeError
    raise {
        "surrogate": ValueError("half a \ud83d smile"),
        "escape": ValueError("\x1b[2J\x00\x07 cleared \u2028 line"),
        "many lines": ValueError("line\n" * 100_000),
    }[what]


def kill_itself(*args):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def slow_and_marked(marks, seconds, value):
    """Leaves a file for every time it runs."""
    with open(f"{marks}/{value}-{time.monotonic_ns()}", "w"):
        time.sleep(seconds)
    return value


# -- for whole runs


def half_a_character(prompt, completions, prompt_ids, completion_ids, **data):
    raise ValueError("half a \ud83d smile")


def sometimes_half_a_character(prompt, completions, prompt_ids, completion_ids, **data):
    if sum(completion_ids) % 16 == 0:
        fail("surrogate")
    return digit_share_reward_fn(prompt, completions, prompt_ids, completion_ids)


def reach_for_the_run(prompt, completions, prompt_ids, completion_ids, **data):
    files = [file for file in Path(os.environ["RUNS_OF_TEST"]).rglob("*") if file.is_file()]
    assert any(file.name == "run.db-shm" for file in files)
    for file in files:
        if file.name.startswith("run.db"):
            with suppress(PermissionError), open(file, "rb") as opened:
                fcntl.lockf(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
                raise AssertionError(f"{file} can be read and locked")
    return digit_share_reward_fn(prompt, completions, prompt_ids, completion_ids)
