"""Reward for code: 1 if the program in a completion passes all its tests, else 0.

The program is the last fenced code block of the completion, or all of it without one. `tests` is

    a text                       Python that runs after the program and raises if it is wrong
    [text, ...]                  the same, as several statements (MBPP's test_list)
    [{"input", "output"}, ...]   the program runs once for each, reads `input` from stdin and must
                                 print `output`, but for white space at the ends of lines

`starter` runs before the program. Each run is a Python process of its own, inside the sandbox of
the reward, which must allow some: `workflow_kwargs: {reward_kwargs: {limits: {max_processes: 8,
network: false}}}`. A program that takes longer than `seconds` is wrong. Tests as Python share the
process with the program they test, so a program written to cheat can pass them; input and output
are compared outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

SECONDS = 10.0
MAX_OUTPUT_BYTES = 16 << 20
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def unit_tests_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    tests: str | Sequence[str | Mapping[str, str]],
    starter: str = "",
    seconds: float = SECONDS,
    **data: Any,
) -> float:
    program = f"{starter}\n\n{program_of(completions)}"
    if isinstance(tests, str):
        return float(_passes(program, tests, seconds))
    if not tests:
        raise ValueError("the row has no tests: expected a text or a list in its column 'tests'")
    if all(isinstance(test, Mapping) for test in tests):
        return float(all(_prints(program, test, seconds) for test in tests))
    return float(_passes(program, "\n".join(map(str, tests)), seconds))


def program_of(completion: str) -> str:
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _passes(program: str, tests: str, seconds: float) -> bool:
    # A program that ends the process early has not passed: the last line shows that it got there.
    mark = secrets.token_hex(16)
    output = _run(f"{program}\n\n{tests}\n\nprint({mark!r})\n", "", seconds)
    return output is not None and output.rstrip().endswith(mark)


def _prints(program: str, test: Any, seconds: float) -> bool:
    output = _run(program, str(test["input"]), seconds)
    return output is not None and _lines(output) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run(program: str, text: str, seconds: float) -> str | None:
    """What it printed; None if it raised, took too long or printed too much."""
    with tempfile.TemporaryDirectory() as folder:
        script, output = Path(folder, "program.py"), Path(folder, "output")
        script.write_text(program, encoding="utf-8", errors="replace")
        Path(folder, "input").write_text(text, encoding="utf-8", errors="replace")
        with Path(folder, "input").open("rb") as given, output.open("wb") as printed:
            code = _wait(_start(script, given, printed), seconds)
        if code != 0 or output.stat().st_size > MAX_OUTPUT_BYTES:
            return None
        return output.read_text(encoding="utf-8", errors="replace")


def _start(script: Path, given: BinaryIO, printed: BinaryIO) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", str(script)]
    try:
        return subprocess.Popen(
            command,
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=script.parent,
            start_new_session=True,
        )
    except PermissionError as error:
        raise RuntimeError(
            "unit_tests needs processes: set workflow_kwargs.reward_kwargs.limits.max_processes "
            "(8, for example)"
        ) from error


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
