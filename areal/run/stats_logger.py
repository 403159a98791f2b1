"""Statistics of every step, reported to run database, trackers and console.

The console gets one line per step:

    Step 12/300 | 0.42 s | reward 0.61 | loss -0.003 | 9.8k tok/s | staleness 1.2 |
        retried 3 (TimeoutError 2, ServerError 1) | failed 1 (ServerError)

Absent statistics are left out. Failures since the previous step follow, by kind. The whole table
follows at DEBUG level. The database is written first, so that it holds everything on the console.
Trackers run in their own threads, and their failures are one more statistic (trackers.py).
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal.run.trackers import TrackerThread, close_all
from areal.utils import logging

if TYPE_CHECKING:
    from areal.run.database import RunDatabase

logger = logging.getLogger("StatsLogger")


@dataclass(frozen=True, slots=True)
class Figure:
    """One entry of the console line: its statistic and format."""

    key: str  # statistic
    before: str = ""
    after: str = ""

    def show(self, value: float) -> str:
        return f"{self.before}{_short(value)}{self.after}"


HEADLINE = (
    Figure("timeperf/step", after=" s"),
    Figure("rollout/reward", before="reward "),
    Figure("eval/reward", before="eval "),
    Figure("eval/loss", before="eval loss "),
    Figure("loss", before="loss "),
    Figure("actor/loss", before="loss "),
    Figure("tokens_per_second", after=" tok/s"),
    Figure("tokens_per_second_predicted", before="predicted ", after=" tok/s"),
    Figure("rollout/staleness", before="staleness "),
)

# Statistics that count since the start of the process -> name on the line. Keys below one
# (`rollout/failed/TimeoutError`) are its kinds.
TALLIES = {
    "rollout/retried": "retried",
    "rollout/rejected": "rejected",
    "rollout/stale": "stale",
    "rollout/failed": "failed",
    "rollout/workers_replaced": "workers replaced",
    "server/requests_resent": "resent",
    "server/replies_refused": "replies refused",
    "server/restarts": "server restarts",
    "trackers/failed": "tracker errors",
}
_MAX_KINDS = 3


class StatsLogger:
    """Reports the statistics of each step; owns `trackers` and closes them.

    stats_logger = StatsLogger(run_db, open_trackers(...), total_steps=300)
    stats_logger.commit(global_step, stats_tracker.export_all())
    """

    def __init__(
        self,
        run_db: RunDatabase,
        trackers: Iterable[TrackerThread] = (),
        *,
        total_steps: int,
        headline: tuple[Figure, ...] = HEADLINE,
    ) -> None:
        self._run_db = run_db
        self._trackers = list(trackers)
        self._total_steps = total_steps
        self._headline = headline
        self._counted: dict[str, float] = {}  # statistics of the previous step

    def commit(self, global_step: int, stats: Mapping[str, float]) -> None:
        """Publish one step's numbers; -1 is before the first step."""
        # `__count` entries are only weights for merging means.
        stats = {**stats, **self._tracker_failures()}
        shown = {key: value for key, value in sorted(stats.items()) if not key.endswith("__count")}
        self._run_db.record_step(global_step, shown)
        for tracker in self._trackers:
            tracker.log(global_step, shown)
        logger.info(self._line(global_step, shown))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("statistics of step %d\n%s", global_step + 1, _table(shown))

    def close(self, timeout_s: float = 30.0) -> None:
        """Trackers have `timeout_s` to send their backlog. Idempotent."""
        close_all(self._trackers, timeout_s)
        self._trackers.clear()

    def _tracker_failures(self) -> dict[str, float]:
        """Since the start, by kind; empty if there are none."""
        kinds = sum((tracker.failures() for tracker in self._trackers), Counter())
        counts = {f"trackers/failed/{kind}": float(count) for kind, count in kinds.items()}
        return counts and {"trackers/failed": float(kinds.total()), **counts}

    def _line(self, global_step: int, stats: Mapping[str, float]) -> str:
        figures = [f.show(stats[f.key]) for f in self._headline if f.key in stats]
        figures += [self._tally(key, name, stats) for key, name in TALLIES.items()]
        line = [f"Step {global_step + 1}/{self._total_steps}", *filter(None, figures)]
        self._counted.update(stats)
        return " | ".join(line)

    def _tally(self, key: str, name: str, stats: Mapping[str, float]) -> str:
        """`failed 3 (TimeoutError 2, ServerError 1)` of this step; empty if there are none."""
        new = stats.get(key, 0) - self._counted.get(key, 0)
        if new <= 0:
            return ""
        kinds = {
            kind.removeprefix(f"{key}/"): count - self._counted.get(kind, 0)
            for kind, count in stats.items()
            if kind.startswith(f"{key}/")
        }
        named = sorted(((n, kind) for kind, n in kinds.items() if n > 0), reverse=True)
        texts = [f"{kind} {n:g}" if len(named) > 1 else kind for n, kind in named[:_MAX_KINDS]]
        more = ["..."] if len(named) > _MAX_KINDS else []
        return f"{name} {new:g}" + (f" ({', '.join(texts + more)})" if texts else "")


def _short(value: float) -> str:
    """About three significant digits: 9.8k, 12.3, 0.61, -0.003, 1.2e-05."""
    if not math.isfinite(value):
        return str(value)
    for divisor, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= divisor:
            return f"{value / divisor:.1f}{unit}"
    if abs(value) < 0.001:
        return f"{value:.2g}"
    decimals = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")


def _table(stats: Mapping[str, float]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for key, value in stats.items():
        table.add_row(key, f"{value:.6g}")
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    return text.getvalue().rstrip()
