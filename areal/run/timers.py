"""When something that happens every so often is due: saving, recover points, evaluation.

Every owner has a timer of its own, ticked once per finished step; no timer shares a counter with
another, and none needs torch.distributed. A timer's state goes into the recover point, so a
resumed run keeps the rhythm of the one that was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from areal.api.io_struct import StepInfo


class FrequencyTimer:
    """Up to three clocks; `tick` is True when any of them fires. None set means never.

    A clock that fires starts over; the others go on.
    """

    def __init__(
        self,
        *,
        freq_epochs: int | None = None,
        freq_steps: int | None = None,
        freq_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        frequencies = {"freq_epochs": freq_epochs, "freq_steps": freq_steps, "freq_secs": freq_secs}
        for name, value in frequencies.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0 or null for never, got {value}")
        self._freq_epochs = freq_epochs
        self._freq_steps = freq_steps
        self._freq_secs = freq_secs
        self._clock = clock
        self._epochs = 0
        self._steps = 0
        self._since = clock()

    def tick(self, step: StepInfo) -> bool:
        """Count one finished step; True when the action is due now."""
        self._steps += 1
        self._epochs += int(step.epoch_step == step.steps_per_epoch - 1)
        due = False
        if self._freq_epochs is not None and self._epochs >= self._freq_epochs:
            self._epochs, due = 0, True
        if self._freq_steps is not None and self._steps >= self._freq_steps:
            self._steps, due = 0, True
        if self._freq_secs is not None and self._clock() - self._since >= self._freq_secs:
            self._since, due = self._clock(), True
        return due

    def state_dict(self) -> dict[str, float]:
        return {
            "epochs": self._epochs,
            "steps": self._steps,
            "elapsed_s": self._clock() - self._since,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on as the timer that gave `state`; time between the two does not count."""
        self._epochs = int(state["epochs"])
        self._steps = int(state["steps"])
        self._since = self._clock() - state["elapsed_s"]
