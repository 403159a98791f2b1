"""One write at a time; its failure reaches the one who asks, and closing waits."""

from __future__ import annotations

import threading

import pytest

from areal.run.recover import BackgroundWriter


def test_a_write_ends_once():
    writer, may_end = BackgroundWriter("test"), threading.Event()
    assert not writer.poll() and not writer.wait()
    writer.start(lambda: may_end.wait(300))
    assert not writer.poll()
    may_end.set()
    assert writer.wait()
    assert not writer.poll() and not writer.wait()
    writer.close()


def test_a_failure_is_raised_once_to_the_next_who_asks():
    writer = BackgroundWriter("test")
    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    assert not writer.wait()
    writer.start(lambda: None)
    assert writer.wait()
    writer.close()


def test_closing_waits_for_the_last_write_and_logs_its_failure(caplog):
    writer, may_end, ended = BackgroundWriter("test"), threading.Event(), []

    def write() -> None:
        may_end.wait(300)
        ended.append(True)
        raise OSError("No space left on device")

    writer.start(write)
    threading.Timer(0.05, may_end.set).start()
    writer.close()
    assert ended == [True]
    assert "the last write failed: No space left on device" in caplog.text
    writer.close()
