"""Failure counts and limits: a broken workflow stops the run instead of starving it.

In: every exception of an episode (also one that a retry fixes) and the end of every group. Out:
counts by kind for the statistics, and a `RolloutFailedError` once too many of the recent groups
failed. A failure never becomes a reward or a rejection.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from areal.utils import logging

logger = logging.getLogger("RolloutFailures")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLimits:
    """Failures tolerated before the run stops."""

    max_failure_ratio: float = 0.1  # failed share of the recent groups
    max_retries: int = 3  # further attempts of an episode after its first
    retry_delay_s: float = 0.1  # before the first retry; doubles each time
    timeout_s: float = 3600.0  # longest time without a finished group


class RolloutFailedError(RuntimeError):
    """Too many groups failed; the message names the most frequent cause."""


class WorkerError(RuntimeError):
    """An exception in a rollout worker process; `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class FailureMeter:
    """Failed share of the last `window` groups, judged once `min_groups` have ended.

    `error` is set when the share first exceeds `max_ratio`, and stays. Used by the loop thread;
    other threads only read `error`.
    """

    def __init__(self, max_ratio: float, *, window: int = 100, min_groups: int = 10) -> None:
        if not 0 <= max_ratio <= 1:
            raise ValueError(f"rollout.max_failure_ratio must lie in [0, 1], got {max_ratio}")
        self.error: RolloutFailedError | None = None
        self.attempts: Counter[str] = Counter()  # exceptions of episodes by kind, retried or not
        self.retries: Counter[str] = Counter()  # those after which the episode was retried
        self.groups: Counter[str] = Counter()  # groups given up, by kind
        self._max_ratio = max_ratio
        self._min_groups = min_groups
        self._recent: deque[Exception | None] = deque(maxlen=window)  # None: the group succeeded

    def on_attempt_failed(self, error: Exception, retried: bool) -> None:
        kind = kind_of(error)
        self.attempts[kind] += 1
        self.retries[kind] += retried
        if self.attempts[kind] == 1:
            logger.warning("first %s of an episode", kind, exc_info=error)

    def on_group_succeeded(self) -> None:
        self._recent.append(None)

    def on_group_failed(self, error: Exception) -> None:
        self.groups[kind_of(error)] += 1
        self._recent.append(error)
        failed = sum(recent is not None for recent in self._recent)
        if len(self._recent) >= self._min_groups and failed > self._max_ratio * len(self._recent):
            self._stop(failed)

    def check(self, *, ended: int) -> None:
        """Judge a finished set of `ended` groups as a whole, however small it is."""
        failed = self.groups.total()
        if self.error is None and failed > self._max_ratio * ended:
            self._stop(failed)
        if self.error is not None:
            raise self.error

    def check_episodes(self, *, ended: int) -> None:
        """Judge the episodes of an evaluation, which a group may lose and still be scored."""
        final = self.attempts - self.retries
        if final.total() > self._max_ratio * ended:
            kind, count = final.most_common(1)[0]
            raise RolloutFailedError(
                f"{final.total()} of {ended} episodes failed, more than "
                f"rollout.max_failure_ratio={self._max_ratio} allows; most frequent cause: {kind} "
                f"({count}x)"
            )

    def counts(self) -> dict[str, float]:
        """For the statistics. Works on copies: the loop thread may update the counters."""
        counts: dict[str, float] = {}
        for name, kinds in (("failed", dict(self.groups)), ("retried", dict(self.retries))):
            counts[name] = sum(kinds.values())
            counts |= {f"{name}/{kind}": count for kind, count in kinds.items() if count}
        return counts

    def _stop(self, failed: int) -> None:
        if self.error is not None:
            return
        errors = [error for error in self._recent if error is not None]
        causes = Counter(describe(error) for error in errors)
        cause, count = causes.most_common(1)[0]
        example = next(error for error in errors if describe(error) == cause)
        logger.error("the most frequent failure", exc_info=example)
        self.error = RolloutFailedError(
            f"{failed} of the last {len(self._recent)} groups failed, more than "
            f"rollout.max_failure_ratio={self._max_ratio} allows; most frequent cause "
            f"({count}x): {cause}"
        )
        self.error.__cause__ = example


class RejectionStreak:
    """Warns when many groups in a row are rejected: the run generates and never trains."""

    def __init__(self, patience: int) -> None:
        self._patience = patience  # groups before the first warning; doubles with each one
        self._reasons: Counter[str] = Counter()  # since the last group that was kept

    def on_kept(self) -> None:
        self._reasons.clear()

    def on_rejected(self, why: str) -> None:
        self._reasons[why] += 1
        count = self._reasons.total()
        if count >= self._patience:
            self._patience = 2 * count
            causes = ", ".join(f"{why} {n}x" for why, n in self._reasons.most_common())
            logger.warning(
                "%d groups in a row were rejected (%s): nothing can be trained. A filter of equal "
                "rewards rejects every group when the task is too hard or already solved, or when "
                "the reward function gives the same for all",
                count,
                causes,
            )


def describe(error: BaseException) -> str:
    """`Kind: message` on one line, for the ledger and for error messages."""
    text = " ".join(str(error).split())
    if len(text) > 300:
        text = text[:297] + "..."
    return f"{kind_of(error)}: {text}" if text else kind_of(error)


def kind_of(error: BaseException) -> str:
    return error.kind if isinstance(error, WorkerError) else type(error).__name__
