"""Inside of a sandbox session: the sockets that stand for the addresses it may connect to.

Process 1 binds one to each name's loopback address and hands all of them out; who accepts on them
is `tunnels`, outside. The session has no other way out: its network has a loopback device alone.

Standard library only: it is loaded by its path, before any command runs.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Any

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_BACKLOG = 32


def hand_out(limits: dict[str, Any]) -> None:
    """Send a listening socket for each of `limits["listen"]`; OSError if one cannot be made."""
    _raise_loopback()
    listeners = []
    for ip, port in limits["listen"]:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        listener.listen(_BACKLOG)
        listeners.append(listener)
    with socket.socket(fileno=limits["network_fd"]) as channel:
        socket.send_fds(channel, [b"."], [one.fileno() for one in listeners])
    for listener in listeners:
        listener.close()


def _raise_loopback() -> None:
    """bubblewrap has done it already."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        asked = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(device, _GET_FLAGS, asked))
        if not flags & _UP:
            fcntl.ioctl(device, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
