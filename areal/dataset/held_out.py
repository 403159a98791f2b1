"""Which problems of a data set without a test split are held out: a hash of the problem says so.

The seed and the number of rows do not matter, so no run can train on a problem that another one
tests with.
"""

from __future__ import annotations

import hashlib

ONE_IN = 10
TEST_SPLITS = ("test", "valid", "validation")


def is_held_out(problem: str) -> bool:
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % ONE_IN == 0


def wants_held_out(split: str) -> bool:
    """Whether `split` names the held-out part."""
    if split != "train" and split not in TEST_SPLITS:
        raise ValueError(f"dataset.split must be train or one of {TEST_SPLITS}, got {split!r}")
    return split in TEST_SPLITS
