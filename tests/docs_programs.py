"""Forks the commands of a page from a process that has imported torch already (fork_server.py).

programs = Programs(run)           # run(argv) -> exit code, in the forked process
env |= programs.env                # for docs_client.py, which a page's shell starts
programs.close()

client -> {"argv", "cwd", "env", "files"} and its open files -> the forked process has them under
                                                               the same numbers
       -> one byte per signal that it got                       -> sent on
       <- one byte, the exit code
A client that ends before its command takes it along.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from fork_server import fork, take_environment

MAX_FILES = 32


class Programs:
    """Listens until `close`, with a thread for each command that runs."""

    def __init__(self, run: Callable[[list[str]], int]) -> None:
        self._run = run
        # Of this user alone: whoever connects has commands run.
        self._folder = tempfile.TemporaryDirectory(prefix="areal-docs-")
        address = os.path.join(self._folder.name, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self.env = {"AREAL_DOCS_PROGRAMS": address}
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._folder.cleanup()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.ExitStack() as stack:
            head, descriptors, _, _ = socket.recv_fds(client, 8, MAX_FILES)
            streams = [stack.enter_context(Connection(number)) for number in descriptors]
            order = json.loads(client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            process = fork(_run_order, self._run, order, streams)
            process.start()
            threading.Thread(target=_pass_signals, args=(client, process), daemon=True).start()
            process.join()
            with contextlib.suppress(OSError):  # it was killed, and the client is gone
                client.sendall(bytes([process.exitcode % 256]))
                client.shutdown(socket.SHUT_RDWR)


def _pass_signals(client: socket.socket, process: BaseProcess) -> None:
    with contextlib.suppress(OSError):
        while received := client.recv(1):
            os.kill(process.pid, received[0])
    with contextlib.suppress(OSError):
        os.kill(process.pid, signal.SIGKILL)


def _run_order(run: Callable[[list[str]], int], order: dict, streams: list[Connection]) -> None:
    for number, stream in zip(order["files"], streams, strict=True):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (until the process ends)
    take_environment(order["env"])
    os.chdir(order["cwd"])
    sys.exit(run(order["argv"]))
