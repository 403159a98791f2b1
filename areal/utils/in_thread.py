"""A function in a thread of its own, and a Future of what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(name: str, act: Callable[..., Any], *args: Any) -> Future:
    """A daemon, which no interpreter waits for at its end: Ctrl-C must not hang on it."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(act(*args))
        except BaseException as error:  # raised by whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
