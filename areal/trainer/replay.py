"""Trains a recorded step again and compares all bits.

    recover point before the step  weights, optimizers, schedule, KL controller, random states
    run.db: starts                 the config, and the number of threads
    run.db: trajectories           the batch, in prompt order as it was trained on
        -> PPOLearner.train ->
    run.db: steps                  the same statistics?
    recover point after the step   the same weights and optimizers, tensor by tensor?

No inference engine and no episode is started; only a scratch folder is written.

    result = replay(read_recording("runs/math/first", step=7))
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal.api.cli_args import (
    PerfTracerConfig,
    PPOConfig,
    StatsLoggerConfig,
)
from areal.api.scratch import ScratchFolder
from areal.engine.train.checkpoint import digests
from areal.rollout.trajectory import decode
from areal.run.numerics import numeric_environment
from areal.run.recover import RecoverPoint
from areal.trainer.base import Trainer
from areal.trainer.episodes import describe_batch
from areal.trainer.ppo.actor import PPOLearner
from areal.trainer.recording import Recording
from areal.trainer.servers import open_teacher
from areal.trainer.shown_images import ShownImages
from areal.utils import stats_tracker

_LEARNED = ("actor/", "critic/")  # statistics that depend on training only


@dataclass(frozen=True, slots=True)
class Compared:
    """A number or checksum of tensors, recorded and replayed; None: absent."""

    name: str
    recorded: float | str | None
    replayed: float | str | None

    @property
    def equal(self) -> bool:
        return _bits(self.recorded) == _bits(self.replayed)


@dataclass(frozen=True, slots=True)
class Replay:
    """The comparison of one replayed step."""

    step: int
    statistics: list[Compared]
    state: list[Compared] | None  # None: no recover point was written after the step
    world: dict[str, tuple[Any, Any]]  # changed `numeric_environment` values: then, now

    @property
    def compared(self) -> list[Compared]:
        return [*self.statistics, *(self.state or ())]

    @property
    def differing(self) -> list[Compared]:
        return [one for one in self.compared if not one.equal]


def replay(recording: Recording) -> Replay:
    start = recording.start
    with ScratchFolder("replay") as scratch, _threads(start.world["threads"]):
        config = apart(recording.config, scratch)
        rows = [{}] * start.dataset_size  # counted, never read
        with Rehearsal(config, rows) as rehearsal:
            replayed = rehearsal.train(recording)
            state = None
            if recording.point_after is not None:
                state = rehearsal.compare_state(recording.point_after, scratch / "replayed")
        world = _paired(start.world, numeric_environment())
    return Replay(
        recording.step,
        _compare_statistics(recording.statistics, replayed),
        state,
        {name: pair for name, pair in world.items() if pair[0] != pair[1]},
    )


class Rehearsal(Trainer):
    """The models of a run without its rollout, in a separate run folder."""

    def _open(self, stack: ExitStack) -> None:
        self.learner = PPOLearner(
            self.config,
            partial(self._open_engine, stack=stack),
            lambda: open_teacher(self.config, self.run.paths, stack, self.scheduler),
        )
        self.run.remember(**self.learner.states())

    def train(self, recording: Recording) -> dict[str, float]:
        """Train the step; returns its statistics. The models then have the state after it."""
        self.run.load(recording.point_before)
        self.learner.engine.set_version(recording.step)
        stats_tracker.export_all()  # drop statistics recorded before the step
        images = ShownImages(recording.config)
        data = self.learner.train(images.fill_in([decode(blob) for blob in recording.trajectories]))
        self.learner.engine.set_version(recording.step + 1)
        return {**stats_tracker.export_all(), **describe_batch(data, version=recording.step)}

    def compare_state(self, point: RecoverPoint, scratch: Path) -> list[Compared]:
        """Compare `point` with a recover point of the current state."""
        self.run.roles.capture()(scratch)
        compared = _compare_roles(point.path, scratch)
        kept = point.load()
        for name, holder in self.learner.states().items():
            pairs = _paired(kept[name], holder.state_dict())
            compared += [Compared(f"{name}/{key}", *pair) for key, pair in pairs.items()]
        return compared


def apart(config: PPOConfig, scratch: Path) -> PPOConfig:
    """The same config with another folder and without trackers."""
    return replace(
        config,
        cluster=replace(config.cluster, fileroot=str(scratch)),
        stats_logger=StatsLoggerConfig(),
        perf_tracer=PerfTracerConfig(),
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """The thread count changes float summation order."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_statistics(
    recorded: Mapping[str, float], replayed: Mapping[str, float]
) -> list[Compared]:
    """Training statistics only; times and rollout counts are not reproducible."""
    names = {name for name in recorded if name.startswith(_LEARNED)}
    names |= {name for name in replayed if not name.startswith("timeperf/")}
    names = {name for name in names if not name.endswith("__count")}
    return [Compared(name, recorded.get(name), replayed.get(name)) for name in sorted(names)]


def _compare_roles(recorded: Path, replayed: Path) -> list[Compared]:
    """One entry per role and kind of tensor: weights, optimizer moments, ..."""
    compared = []
    for role in sorted(folder.name for folder in replayed.iterdir()):
        pairs = _paired(digests(recorded / role), digests(replayed / role))
        by_kind = {name: name.partition(".")[0] for name in pairs}
        for kind in sorted(set(by_kind.values()), reverse=True):  # weights first
            names = [name for name in pairs if by_kind[name] == kind]
            compared.append(_compare_tensors(role, kind, {name: pairs[name] for name in names}))
    return compared


def _compare_tensors(role: str, kind: str, pairs: Mapping[str, tuple[str, str]]) -> Compared:
    """One entry for all tensors of a kind; if some differ, the first one that does."""
    for name, pair in pairs.items():
        if pair[0] != pair[1]:
            return Compared(f"{role}: {name}", *pair)
    together = hashlib.sha256("".join(digest for digest, _ in pairs.values()).encode()).hexdigest()
    return Compared(f"{role}: {kind} [{len(pairs)}]", together, together)


def _paired(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(recorded.keys() | replayed.keys())
    return {name: (recorded.get(name), replayed.get(name)) for name in names}


def _bits(value: float | str | None) -> str | None:
    """Equal for equal bits: NaN equals NaN, and -0 differs from 0."""
    return value if isinstance(value, str | None) else float(value).hex()
