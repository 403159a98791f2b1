"""Context of a running episode, available without passing it through every call.

In: the executor enters `episode(...)` around each call of a workflow. Out: the workflow reads
`workflow_context` anywhere below that call, also in asyncio tasks it starts.

    from areal.api.workflow_context import workflow_context

    gconfig = self.gconfig.new(seed=workflow_context.next_seed())
    stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)

Invariant: the n-th seed of a sample is a function of (run seed, prompt, sample, n) alone. A retried
or re-issued episode draws the same tokens from the same weights, so a resumed run can be bit-equal.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

Span = tuple[str, float, float]  # stage, start and end in times of `time.perf_counter`


@dataclass(slots=True)
class Episode:
    """One call of a workflow."""

    task_id: int  # position of its prompt in the prompt stream, or in the evaluation set
    sample: int  # 0-based index in the prompt's group
    is_eval: bool
    run_seed: int
    requests: int = 0  # seeds handed out so far
    is_group: bool = False  # one call for all samples
    began: float = field(default_factory=time.perf_counter)
    spans: list[Span] = field(default_factory=list[Span])  # of generation, tools and rewards

    def seed(self, sample: int) -> int:
        """Of the next request of a sample."""
        # Evaluation prompts are also numbered from 0; bit 0 separates their draws from training's.
        stream = self.run_seed * 2 + int(self.is_eval)
        return sampling_seed(stream, self.task_id, sample, self.requests)


_current: ContextVar[Episode | None] = ContextVar("areal_episode", default=None)


class WorkflowContext:
    """Reads the episode of the calling coroutine. One instance: `workflow_context`.

    Outside an episode (a workflow called by hand) the stat scope is "rollout" and seeds are None,
    so the engine draws its own.
    """

    def get(self) -> Episode | None:
        return _current.get()

    @property
    def is_eval(self) -> bool:
        current = _current.get()
        return current is not None and current.is_eval

    @property
    def task_id(self) -> int | None:
        current = _current.get()
        return None if current is None else current.task_id

    def stat_scope(self) -> str:
        """Name of the statistics tracker this episode reports to."""
        return "eval-rollout" if self.is_eval else "rollout"

    def next_seed(self) -> int | None:
        """Seed for the episode's next generation request."""
        current = _current.get()
        if current is None:
            return None
        seed = current.seed(current.sample)
        current.requests += 1
        return seed

    def next_seeds(self, num_samples: int) -> list[int | None]:
        """Those of the first `num_samples` samples, for the next request of a whole group."""
        current = _current.get()
        if current is None:
            return [None] * num_samples
        seeds: list[int | None] = [current.seed(sample) for sample in range(num_samples)]
        current.requests += 1
        return seeds


workflow_context = WorkflowContext()


@contextmanager
def episode(
    *, task_id: int, sample: int, is_eval: bool, run_seed: int, is_group: bool = False
) -> Generator[Episode]:
    """Make the calling coroutine, and tasks it starts from here, part of this episode."""
    current = Episode(task_id, sample, is_eval, run_seed, is_group=is_group)
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


def sampling_seed(run_seed: int, task_id: int, sample: int, request_index: int) -> int:
    """A seed in [0, 2**63), the same on every machine and Python version."""
    packed = struct.pack("<4q", run_seed, task_id, sample, request_index)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
