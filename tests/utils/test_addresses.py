"""Sockets that servers listen on."""

from __future__ import annotations

import errno
import socket

import pytest

from areal.utils.addresses import bind


def test_replies_wait_for_no_acknowledgement():
    """A reply is written as head and body: with Nagle's algorithm the body would wait."""
    with (
        bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname(), timeout=900),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_port_in_use_is_named():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}") as found:
            bind("127.0.0.1", port)
    assert found.value.errno == errno.EADDRINUSE
