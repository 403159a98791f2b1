"""Python's cycle collector, set for a process with tens of thousands of coroutines in flight.

Every waiting episode is some fifty live objects, and the collector looks at them again and again:
left as it is, it takes a fifth of a busy event loop's time and stops it for a fifth of a second at
a time. Almost nothing an episode makes is a cycle, so looking less often costs little memory.
"""

from __future__ import annotations

import gc

_THRESHOLDS = (10_000, 20, 20)  # Python's own first one is 700 (2,000 from 3.13 on)


def settle_garbage_collector() -> None:
    """Call it when modules and models are loaded: they are never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
