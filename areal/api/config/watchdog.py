"""The `watchdog` section: when a run in which nothing moves is ended."""

from __future__ import annotations

from areal.api.config.checks import require_above
from areal.api.config.section import config_section


@config_section
class WatchdogConfig:
    """Ends a run that hangs, and says who waits for whom."""

    seconds: float | None = 300.0
    """Longest time in which no episode ends, no token is generated, no phase begins, no
    micro-batch is computed and no stage of the start ends. null: wait for ever."""

    def __post_init__(self) -> None:
        require_above(0, seconds=self.seconds)
