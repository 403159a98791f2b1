"""How many bytes of images may one session show? They are kept with the run, hence a bound."""

from __future__ import annotations

import threading

from areal.openai.errors import WireError


class ImageBudget:
    """Of one session; each image is counted once. Safe for several threads."""

    def __init__(self, max_mb: float) -> None:
        self._max_mb = max_mb
        self._taken = 0
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def take(self, name: str, size: int) -> None:
        """WireError if it does not fit; before it is kept, whatever becomes of the call."""
        with self._lock:
            if name in self._names:
                return
            if self._taken + size > self._max_mb * (1 << 20):
                raise WireError(
                    413,
                    f"messages: this session has shown {self._taken / (1 << 20):.1f} MB of images, "
                    f"and with one of {size / (1 << 20):.1f} MB it would be more than "
                    f"rollout.agent.max_image_mb={self._max_mb:g}: show fewer or smaller ones",
                    "messages",
                )
            self._names.add(name)
            self._taken += size
