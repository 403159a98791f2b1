"""Start-up stages of a run, each logged with its duration, so that no start is silent.

    with stage("data set arithmetic"):
        rows = load(...)
    with stage("1 inference server", limit_s=300):   # it has a deadline of its own
        server.wait_ready(timeout_s=300)

    02:35:12 [Startup] data set arithmetic: 0.8 s
    02:35:22 [Startup] 1 inference server: 10 s so far
    02:35:31 [Startup] 1 inference server: 18.7 s

The start and end of a stage count as progress; in between the watchdog names the stage.

    with importing():                                # libraries: a tenth less CPU time
        import torch
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from areal.utils import logging, waits

logger = logging.getLogger("Startup")

_FIRST_REPORT_S = 10.0  # then at doubling intervals


@contextmanager
def stage(name: str, *, limit_s: float = 0.0) -> Iterator[None]:
    """`limit_s`: how long it may take without progress, if it enforces a deadline itself."""
    began = time.monotonic()
    done = threading.Event()
    reporter = threading.Thread(
        target=_report, args=(name, began, done, _FIRST_REPORT_S), name="startup", daemon=True
    )
    reporter.start()
    waits.progress()
    try:
        with waits.allowed(limit_s), waits.waiting(name):
            yield
    finally:
        done.set()
    waits.progress()
    logger.info("%s: %.1f s", name, time.monotonic() - began)


@contextmanager
def importing() -> Iterator[None]:
    """Import without the garbage collector: modules stay, so it finds nothing to free. It will not
    look at them later either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _report(name: str, began: float, done: threading.Event, wait_s: float) -> None:
    while not done.wait(wait_s):
        logger.info("%s: %.0f s so far", name, time.monotonic() - began)
        wait_s *= 2
