"""Threads of this process: a function in its own one, and how they share the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(name: str, act: Callable[..., Any], *args: Any) -> Future:
    """A daemon thread is not joined at interpreter exit: Ctrl-C must not hang on it."""
    future: Future = Future()
    future.set_running_or_notify_cancel()  # a consumer that is cancelled must not cancel it

    def run() -> None:
        try:
            future.set_result(act(*args))
        except BaseException as error:  # raised by the future's consumer
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


_SWITCH_S = 2e-4  # Python's own is 5e-3


def share_interpreter() -> None:
    """For a process in which a thread computes while another serves: the one that waits for the
    GIL gets it within 0.2 ms.

    A thread that computes releases the GIL in most operators and then waits for it until the other
    thread blocks, or for 5 ms: an operator of a small model takes a hundredth of that.
    """
    sys.setswitchinterval(_SWITCH_S)
