"""Launchers: join an existing Ray cluster, or create one inside a Slurm job.

`python -m areal.infra.launcher.local|ray|slurm script.py --config FILE key=value...` is
`areal launch local|ray|slurm --script script.py FILE key=value...`, in the older way of writing.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exec_launch(place: str) -> NoReturn:
    """Become the command `areal launch PLACE` with the arguments of this one."""
    words = [word.removeprefix("--config=") for word in sys.argv[1:] if word != "--config"]
    if words and not words[0].startswith("-"):  # else it asks for help
        words.insert(0, "--script")
    os.execv(sys.executable, [sys.executable, "-m", "areal.cli.main", "launch", place, *words])
