"""Frames between a process and its child: they arrive as sent, or it is known why not."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time

import pytest

from areal.utils.channel import AsyncChannel, Channel


@pytest.fixture
def ends():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "parts", [[], [b""], [b"a", b"", b"bc"], [bytes(3_000_000), b"x"]], ids=len
)
def test_parts_arrive_as_sent(ends, parts):
    sender = threading.Thread(target=ends[0].send, args=parts)
    sender.start()
    assert ends[1].receive(timeout_s=20) == parts
    sender.join()


def test_silence_and_a_closed_end_are_told_apart(ends):
    ours, theirs = ends
    with pytest.raises(TimeoutError):
        ours.receive(timeout_s=0.05)
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive(timeout_s=20)


def test_closing_wakes_a_thread_that_waits(ends):
    ours, _ = ends
    seen = []

    def wait():
        try:
            ours.receive()
        except (EOFError, OSError) as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ours.close()
    thread.join(900)
    assert not thread.is_alive() and seen


def test_a_frame_has_one_deadline_however_slowly_it_comes():
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def trickle():
        theirs.sendall(struct.pack("!QQ", 1, 1000))
        while not stop.wait(0.05):
            theirs.sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        Channel(ours).receive(timeout_s=0.5)
    assert time.monotonic() - began < 20
    stop.set()
    sender.join()
    ours.close()
    theirs.close()


def test_a_peer_that_does_not_read_is_not_waited_for(ends):
    with pytest.raises(TimeoutError):
        ends[0].send(bytes(100_000_000), timeout_s=0.1)


@pytest.mark.parametrize("header", [(1 << 60,), (1, 1 << 60), (2, 600, 600)])
def test_no_memory_is_taken_for_a_frame_beyond_the_bound(header):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(f"!{len(header)}Q", *header))
        with pytest.raises(EOFError, match="malformed frame"):
            Channel(ours, max_bytes=1000).receive(timeout_s=20)


def test_the_same_frames_on_an_event_loop():
    async def talk() -> None:
        left, right = [await AsyncChannel.open(end) for end in socket.socketpair()]
        big = bytes(5_000_000)
        left.send(b"a", b"")
        left.send(big)  # nobody reads yet: the loop is not blocked
        assert await right.receive() == [b"a", b""]
        assert await right.receive() == [big]
        left.close()
        with pytest.raises(EOFError):
            await right.receive()
        right.close()

    asyncio.run(asyncio.wait_for(talk(), 60))
