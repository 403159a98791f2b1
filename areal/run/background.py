"""One write at a time beside the work: what failed there is raised where it is asked for.

writer = BackgroundWriter("recover")
writer.wait()                             # for the write before, if any
writer.start(lambda: store.save(...))
writer.poll()                             # True once per write that ended well
writer.close()                            # nothing is left unwritten
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from areal.utils import logging
from areal.utils.waits import waiting

logger = logging.getLogger("Recover")


class BackgroundWriter:
    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending: Future[object] | None = None

    def start(self, write: Callable[[], object]) -> None:
        assert self._pending is None, "wait for the write before"
        self._pending = self._thread.submit(write)

    def poll(self) -> bool:
        """Whether a write has ended since the last call; what it raised is raised here."""
        if self._pending is None or not self._pending.done():
            return False
        return self.wait()

    def wait(self) -> bool:
        """`poll` that waits for the write under way."""
        if self._pending is None:
            return False
        pending = self._pending
        with waiting(f"the write of {self._name}"):
            pending.exception()  # an interrupted wait leaves it pending
        self._pending = None
        pending.result()
        return True

    def close(self) -> None:
        """Wait for the last write. A failure nobody asked for is logged."""
        try:
            self.wait()
        except Exception as error:
            # An earlier error is on its way to the user, or a caller closes without having waited.
            logger.error("the last write failed: %s", error)
        finally:
            self._thread.shutdown()
