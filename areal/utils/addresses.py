"""Where a server of this machine listens, and where others reach it. Loads nothing."""

from __future__ import annotations

import socket

ANY_ADDRESS = ("0.0.0.0", "::", "")  # hosts that mean all addresses of the machine


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is detected before the server is made."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it; asyncio sets it only on sockets made for TCP by name. Without
    # it the body of a reply waits up to 40 ms for the client to acknowledge the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host}:{port} ({error.strerror}); choose another port, or 0"
        raise OSError(error.errno, reason) from None
    return listener


def reachable_url(host: str, port: int) -> str:
    """The address of a server on this machine that listens on `host`, which may be any of its
    addresses (0.0.0.0): then the one that packets to other machines are sent from."""
    if host in ANY_ADDRESS:
        host = _own_address()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_address() -> str:
    try:
        return address_towards("192.0.2.1", 9)  # an address of no machine
    except OSError:  # without a network
        return "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """The local address that packets to `host` are sent from; OSError if there is no way there."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]


def free_port(host: str) -> int:
    """A currently unused port; a server that finds it taken exits with an error."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
