"""`python -m areal.tools.validate_installation`, AReaL's name of `areal validate`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    command = ["-m", "areal.cli.main", "validate", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
