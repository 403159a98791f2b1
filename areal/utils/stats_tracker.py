"""Statistics of a step, recorded anywhere and reduced once: `export()` empties the tracker.

    with stats_tracker.scope("update"):
        stats_tracker.denominator(n_tokens=loss_mask)              # bool tensor
        stats_tracker.stat(denominator="n_tokens", ratio=ratio)    # same shape, masked
        stats_tracker.scalar(lr=1e-3)
    stats_tracker.export()
    # {"update/n_tokens": 512.0, "update/ratio/avg": .., "update/ratio/min": ..,
    #  "update/ratio/max": .., "update/lr": 1e-3, "update/lr__count": 1}

The tracker keeps sums, counts and extrema, never the tensors, and leaves them on their device until
`export`, so recording neither grows memory nor synchronises a GPU. Safe to call from any thread or
task: scopes belong to the caller's context. `get("rollout")` is a separate tracker whose keys all
start with `rollout/`; the module's own functions use the unnamed one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ReduceType(Enum):
    """How the values under one key become numbers."""

    AVG_MIN_MAX = "avg_min_max"  # three keys: key/avg, key/min, key/max
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"  # mean of plain numbers, with key__count


@dataclass(slots=True)
class Partial:
    """Accumulated state of one key. Fields are numbers or 0-d tensors; partials add up."""

    reduce_type: ReduceType
    total: Any = 0.0  # sum of the counted values
    count: Any = 0.0
    low: Any = float("inf")
    high: Any = float("-inf")

    def add(self, other: Partial) -> None:
        self.total = self.total + other.total
        self.count = self.count + other.count
        self.low = _smaller(self.low, other.low)
        self.high = -_smaller(-self.high, -other.high)

    def as_floats(self) -> Partial:
        """The same with plain numbers; this synchronises the GPU."""
        values = (float(x) for x in (self.total, self.count, self.low, self.high))
        return Partial(self.reduce_type, *values)

    def results(self, key: str) -> dict[str, float]:
        """The exported keys. A mean or extremum of no values is omitted."""
        if self.reduce_type is ReduceType.SUM:
            return {key: self.total}
        if not self.count:
            return {}
        mean = self.total / self.count
        match self.reduce_type:
            case ReduceType.AVG_MIN_MAX:
                return {f"{key}/avg": mean, f"{key}/min": self.low, f"{key}/max": self.high}
            case ReduceType.AVG:
                return {key: mean}
            case ReduceType.MIN:
                return {key: self.low}
            case ReduceType.MAX:
                return {key: self.high}
            case ReduceType.SCALAR:
                return {key: mean, f"{key}__count": self.count}


class StatsTracker:
    """Named statistics under nested scopes. See the module's example."""

    def __init__(self, name: str = "") -> None:
        self._lock = threading.Lock()
        self._partials: dict[str, Partial] = {}
        # The last mask of each denominator: later `stat` calls use it.
        self._masks: dict[str, torch.Tensor] = {}
        prefix = (name,) if name else ()
        self._scope: ContextVar[tuple[str, ...]] = ContextVar(f"stats_scope_{name}", default=prefix)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix keys with `name/`; scopes nest."""
        token = self._scope.set((*self._scope.get(), name.strip("/")))
        try:
            yield
        finally:
            self._scope.reset(token)

    def denominator(self, **masks: torch.Tensor) -> None:
        """Bool tensors that select entries. Each also exports its number of True."""
        for name, mask in masks.items():
            _require_bool_tensor(name, mask)
            key = self._key(name)
            with self._lock:
                self._masks[key] = mask.detach()
                self._add(key, Partial(ReduceType.SUM, total=mask.detach().sum()))

    def stat(
        self, denominator: str, reduce_type: ReduceType | None = None, **values: torch.Tensor
    ) -> None:
        """Tensors of the denominator's shape, counted where it is True (default AVG_MIN_MAX)."""
        reduce_type = reduce_type or ReduceType.AVG_MIN_MAX
        if reduce_type is ReduceType.SCALAR:
            raise ValueError("stat() takes tensors; record plain numbers with scalar()")
        mask = self._mask(denominator)
        for name, value in values.items():
            if value.shape != mask.shape:
                raise ValueError(
                    f"stat {self._key(name)} has shape {tuple(value.shape)} but its denominator "
                    f"{denominator} has {tuple(mask.shape)}; they must be equal"
                )
            with self._lock:
                self._add(self._key(name), _masked_partial(value, mask, reduce_type))

    def scalar(self, **values: float) -> None:
        """Plain numbers; exported as their mean, and their number as `key__count`."""
        with self._lock:
            scope = self._key("")
            for name, value in values.items():
                known = self._partials.get(scope + name)
                if known is not None and known.reduce_type is ReduceType.SCALAR:
                    known.total += float(value)  # in place: several of every episode
                    known.count += 1.0
                else:
                    self._add(scope + name, Partial(ReduceType.SCALAR, float(value), 1.0))

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Seconds spent in the block, as `timeperf/name` whatever the scope."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            with self._lock:
                self._add(f"timeperf/{name}", Partial(ReduceType.SCALAR, elapsed, 1.0))

    def export(
        self, key: str | None = None, reduce_group: Any = None, reset: bool = True
    ) -> dict[str, float]:
        """The reduced numbers, of all keys or of those at and below `key`.

        With `reduce_group` (a torch.distributed group; every rank of it calls) they are reduced
        over its ranks; a rank that lacks a key adds nothing to it. `reset` clears what was
        exported.
        """
        partials = self._take(key, reset)
        if reduce_group is not None:
            partials = _sum_over_ranks(partials, reduce_group)
        results: dict[str, float] = {}
        for name in sorted(partials):
            results.update(partials[name].results(name))
        return results

    def scope_path(self) -> str:
        """The caller's scope, like `actor/update`; empty outside of any."""
        return "/".join(self._scope.get())

    def take(self) -> dict[str, Partial]:
        """Return everything recorded so far as plain numbers and clear it: to be merged into the
        tracker of another process."""
        return self._take(None, reset=True)

    def merge(self, partials: Mapping[str, Partial]) -> None:
        """Add the partials of another process's tracker; keys are absolute, whatever the scope."""
        with self._lock:
            for key, partial in partials.items():
                self._add(key, partial)

    def _take(self, key: str | None, reset: bool) -> dict[str, Partial]:
        with self._lock:
            names = [
                n for n in self._partials if key is None or n == key or n.startswith(f"{key}/")
            ]
            taken = {name: self._partials[name].as_floats() for name in names}
            if reset:
                for name in names:
                    del self._partials[name]
                    self._masks.pop(name, None)
        return taken

    def _add(self, key: str, partial: Partial) -> None:
        known = self._partials.get(key)
        if known is None:
            self._partials[key] = partial
        elif known.reduce_type is not partial.reduce_type:
            raise ValueError(
                f"statistic {key} was recorded as {known.reduce_type.value} and now as "
                f"{partial.reduce_type.value}; give one of them another name"
            )
        else:
            known.add(partial)

    def _key(self, name: str) -> str:
        return "/".join((*self._scope.get(), name))

    def _mask(self, denominator: str) -> torch.Tensor:
        """The denominator of that name in this scope, or in the nearest enclosing one."""
        scope = self._scope.get()
        with self._lock:
            for depth in range(len(scope), -1, -1):
                mask = self._masks.get("/".join((*scope[:depth], denominator)))
                if mask is not None:
                    return mask
            known = ", ".join(sorted(self._masks)) or "none"
        raise ValueError(
            f"no denominator {self._key(denominator)} has been recorded (known: {known}); "
            "call denominator() before stat()"
        )


def _masked_partial(value: torch.Tensor, mask: torch.Tensor, reduce_type: ReduceType) -> Partial:
    import torch

    value = value.detach().to(torch.float32)
    # where, not multiplication: a NaN outside the mask must not leak in.
    total = torch.where(mask, value, 0.0).sum(dtype=torch.float64)
    partial = Partial(reduce_type, total=total, count=mask.sum())
    if value.numel():
        partial.low = torch.where(mask, value, float("inf")).min()
        partial.high = torch.where(mask, value, float("-inf")).max()
    return partial


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, float) and isinstance(b, float):
        return min(a, b)
    import torch

    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _require_bool_tensor(name: str, mask: torch.Tensor) -> None:
    import torch

    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
        found = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"denominator {name} must be a bool tensor, got {found}; add .bool()")


def _sum_over_ranks(partials: dict[str, Partial], group: Any) -> dict[str, Partial]:
    """Gathers whole dicts: a few kB per step, and ranks need not agree on keys first."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, partials, group=group)
    merged: dict[str, Partial] = {}
    for of_rank in gathered:
        for key, partial in of_rank.items():
            if key in merged:
                merged[key].add(partial)
            else:
                merged[key] = partial
    return merged


_trackers_lock = threading.Lock()
_trackers: dict[str, StatsTracker] = {"": StatsTracker()}


def get(name: str = "") -> StatsTracker:
    """The tracker of that name, one per process; created at the first call."""
    with _trackers_lock:
        if name not in _trackers:
            _trackers[name] = StatsTracker(name)
        return _trackers[name]


def export_all(reduce_group: Any = None, reset: bool = True) -> dict[str, float]:
    """The exports of all trackers of this process, in one dict."""
    results: dict[str, float] = {}
    with _trackers_lock:
        trackers = [_trackers[name] for name in sorted(_trackers)]
    for tracker in trackers:
        results.update(tracker.export(reduce_group=reduce_group, reset=reset))
    return results


def take_all() -> dict[str, dict[str, list[Any]]]:
    """Take all trackers of this process as JSON values, for `add_all` in another one."""
    with _trackers_lock:
        trackers = dict(_trackers)
    taken = {name: tracker._take(None, reset=True) for name, tracker in trackers.items()}
    return {
        name: {key: [p.reduce_type.value, p.total, p.count, p.low, p.high] for key, p in of.items()}
        for name, of in taken.items()
        if of
    }


def add_all(taken: dict[str, dict[str, list[Any]]]) -> None:
    """Add what another process recorded to the trackers of this one."""
    for name, of_tracker in taken.items():
        tracker = get(name)
        with tracker._lock:
            for key, (reduce_type, *numbers) in of_tracker.items():
                tracker._add(key, Partial(ReduceType(reduce_type), *numbers))


_default = _trackers[""]
scope = _default.scope
denominator = _default.denominator
stat = _default.stat
scalar = _default.scalar
record_timing = _default.record_timing
export = _default.export
scope_path = _default.scope_path
take = _default.take
merge = _default.merge
