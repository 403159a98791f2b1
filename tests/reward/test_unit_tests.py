"""The reward for code, in the sandbox it is made for."""

from __future__ import annotations

import asyncio

import pytest

from areal.reward.unit_tests import program_of, unit_tests_reward_fn
from areal.sandbox.pool import AsyncRewardWrapper, RewardError

LIMITS = {"max_processes": 8, "network": False}
ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
ECHO = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
SUMS = [{"input": "1 2", "output": "3"}, {"input": "4 5 6", "output": "15 \n"}]


def fenced(program: str) -> str:
    return f"First:\n```\nnonsense\n```\nand then\n```python\n{program}\n```\nDone."


def test_verdicts():
    """In one sandbox, since starting one costs most."""
    cases = [
        (ADD, {"tests": TESTS}, 1),
        (fenced(ADD), {"tests": TESTS}, 1),
        (ADD, {"tests": TESTS.splitlines()}, 1),
        ("def add(a, b):\n    return a - b\n", {"tests": TESTS}, 0),
        ("def add(a, b) return", {"tests": TESTS}, 0),
        ("def add(a, b):\n    import os\n    os._exit(0)\n", {"tests": TESTS}, 0),  # nothing passed
        ("while True: pass", {"tests": TESTS, "seconds": 0.5}, 0),
        ("add = base", {"tests": TESTS, "starter": ADD.replace("add", "base")}, 1),
        (ECHO, {"tests": SUMS}, 1),
        (ECHO, {"tests": [*SUMS, {"input": "1", "output": "2"}]}, 0),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", {"tests": ""}, 0),
        ("x = '\0'", {"tests": ""}, 0),
    ]

    async def judge() -> list[float]:
        reward = AsyncRewardWrapper(unit_tests_reward_fn, limits=LIMITS, timeout_seconds=60)
        try:
            return [await reward("", text, [], [], **row) for text, row, _ in cases]
        finally:
            reward.close()

    assert asyncio.run(judge()) == [expected for *_, expected in cases]


def test_a_sandbox_without_processes_is_an_error_that_names_the_key():
    async def judge() -> float:
        reward = AsyncRewardWrapper(unit_tests_reward_fn, max_retries=0)
        try:
            return await reward("", ADD, [], [], tests=TESTS)
        finally:
            reward.close()

    with pytest.raises(RewardError, match="reward_kwargs.limits.max_processes"):
        asyncio.run(judge())


def test_rows_without_tests_are_refused():
    with pytest.raises(ValueError, match="no tests"):
        unit_tests_reward_fn("", ADD, [], [], tests=[])


def test_the_last_block_is_the_program():
    assert program_of(fenced("x = 1")) == "x = 1\n"
    assert program_of("x = 1") == "x = 1"
