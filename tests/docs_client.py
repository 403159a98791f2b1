"""`areal` and `python` of a page's shell: has its command forked by docs_programs.py, ends with it.

It imports next to nothing, because it runs for each command of the documentation.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> int:
    order = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}
    text = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as programs:
        programs.connect(os.environ["AREAL_DOCS_PROGRAMS"])
        socket.send_fds(programs, [len(text).to_bytes(8, "big")], [0, 1, 2])
        programs.sendall(text)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: programs.sendall(bytes([received])))
        code = programs.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    sys.exit(main())
