"""Runs attacks in one confined process and prints what became of each, for any user.

    python attack_report.py '{"attacks": [["limit_parent"]], "limits": {}, "timeout_s": 30}'

Prints a JSON list: the number an attack returned, or the text of its error.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from areal.sandbox.pool import AsyncRewardWrapper, RewardError

NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"  # that of the tests may lie where only root can read


def outcomes(*attacks: list[Any], user: str = "me", timeout_s: float = 900, **limits: Any) -> list:
    """What each attack returned, or its error, when `user` ("me" or "nobody") runs them."""
    order = {"attacks": attacks, "limits": limits, "timeout_s": timeout_s}
    done = _run(user, str(Path(__file__)), json.dumps(order), timeout=timeout_s + 240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@cache
def nobody_can_run() -> bool:
    """That takes root, and a Python and sources that others can read."""
    try:
        return _run("nobody", "-c", "import areal.sandbox.pool", timeout=900).returncode == 0
    except (PermissionError, FileNotFoundError):
        return False


def _run(user: str, *args: str, timeout: float) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    options: dict[str, Any] = {"cwd": "/", "capture_output": True, "text": True}
    env = {name: value for name, value in os.environ.items() if name.startswith("AREAL_")}
    options["env"] = env | {"PYTHONPATH": f"{root}:{root / 'tests'}", "PATH": "/usr/bin:/bin"}
    if user == "nobody":
        options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    python = SYSTEM_PYTHON if user == "nobody" else sys.executable
    return subprocess.run([python, *args], timeout=timeout, check=False, **options)


async def report(order: dict[str, Any]) -> list[Any]:
    wrapper = AsyncRewardWrapper(
        "sample_kernel_attacks.attack",
        order["timeout_s"],
        max_workers=1,
        max_retries=0,
        limits=order["limits"],
    )
    found: list[Any] = []
    with closing(wrapper):
        for attack in order["attacks"]:
            try:
                found.append(await wrapper(*attack))
            except RewardError as error:
                found.append(str(error))
    return found


if __name__ == "__main__":
    tempfile.tempdir = os.environ.get("AREAL_TEST_TMPDIR")
    print(json.dumps(asyncio.run(report(json.loads(sys.argv[1])))))
