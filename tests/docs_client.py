"""`areal` and `python` of a page's shell: has its command forked by docs_programs.py, ends with it.

The forked process has the open files of this one, under the same numbers.

It imports next to nothing, because it runs for each command of the documentation.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> int:
    numbers = open_files()
    order = {
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "files": numbers,
    }
    text = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as programs:
        programs.connect(os.environ["AREAL_DOCS_PROGRAMS"])
        socket.send_fds(programs, [len(text).to_bytes(8, "big")], numbers)
        for number in numbers[3:]:  # so that the forked process alone holds them
            os.close(number)
        programs.sendall(text)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: programs.sendall(bytes([received])))
        code = programs.recv(1)
    return code[0] if code else 1


def open_files() -> list[int]:
    """Standard input, output and errors, and what else was inherited."""
    inherited = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and is_inherited(number):
            inherited.append(number)
    return [0, 1, 2, *sorted(inherited)]


def is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # that of the listing
        return False


if __name__ == "__main__":
    sys.exit(main())
