"""Stands in for the hub's package: the calls areal makes of it, and what a hub can do wrong."""

from __future__ import annotations

import os
import random
import signal
import sys
import time


def create_dataset(name, seed, size, **options):
    if name == "unknown":
        raise ValueError(f"Dataset {name!r} not registered")
    return Tasks(name, seed, **options)


class Tasks:
    def __init__(self, name, seed, biggest=9):
        self.name = name
        random.seed(seed)
        self.number = random.randint(0, biggest)

    def __getitem__(self, index):
        print("a hub may print what it likes")
        return {"question": f"say {self.number}", "answer": str(self.number)}

    def score_answer(self, answer, entry):
        fault = getattr(self, f"on_{self.name}", None)
        if fault is not None and answer == "fault":
            return fault()
        return float(answer == entry["answer"])

    def on_raises(self):
        raise KeyError("the hub's own fault")

    def on_nan(self):
        return float("nan")

    def on_hangs(self):
        time.sleep(900)

    def on_dies(self):
        print("out of memory, or so", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_text(self):
        return "much"

    def on_draws(self):
        return random.random()
