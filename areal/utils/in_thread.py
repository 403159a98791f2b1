"""Runs a function in its own daemon thread; returns a Future."""

from __future__ import annotations

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
