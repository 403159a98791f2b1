"""Trains a step of a run again from what was recorded of it (recording.py), and compares all bits.

    recover point before the step  weights, optimizers, schedule, KL controller, random states
    run.db: starts                 the config, and how many threads computed
    run.db: trajectories           the batch, in prompt order as it was trained on
        -> Learner.train ->
    run.db: steps                  the same statistics?
    recover point after the step   the same weights and optimizers, tensor by tensor?

No inference engine and no episode is started, and nothing is written but to a scratch folder.
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

from areal.api.cli_args import PerfTracerConfig, PPOConfig, StatsLoggerConfig
from areal.api.scratch import ScratchFolder
from areal.engine.train.checkpoint import digests
from areal.rollout.trajectory import decode
from areal.run.recover import RecoverPoint
from areal.run.world import numeric_world
from areal.trainer.base import Trainer
from areal.trainer.episodes import describe_batch
from areal.trainer.ppo.learner import Learner
from areal.trainer.recording import Recording
from areal.utils import stats_tracker

_LEARNED = ("actor/", "critic/")  # statistics that training alone makes


@dataclass(frozen=True, slots=True)
class Compared:
    """One number, or the checksum of tensors, then and now; None: it was not there."""

    name: str
    recorded: float | str | None
    replayed: float | str | None

    @property
    def equal(self) -> bool:
        return _bits(self.recorded) == _bits(self.replayed)


@dataclass(frozen=True, slots=True)
class Replay:
    """What came out of a step that was trained again."""

    step: int
    statistics: list[Compared]
    state: list[Compared] | None  # None: no recover point was written after the step
    world: dict[str, tuple[Any, Any]]  # what else has changed since: then, now

    @property
    def compared(self) -> list[Compared]:
        return [*self.statistics, *(self.state or ())]

    @property
    def differing(self) -> list[Compared]:
        return [one for one in self.compared if not one.equal]


def replay(recording: Recording) -> Replay:
    start = recording.start
    with ScratchFolder("replay") as scratch, _threads(start.world["threads"]):
        config = _apart(recording.config, scratch)
        rows = [{}] * start.dataset_size  # counted, never read
        with _Rehearsal(config, rows) as rehearsal:
            replayed = rehearsal.train(recording)
            state = None
            if recording.point_after is not None:
                state = rehearsal.compare_state(recording.point_after, scratch / "replayed")
        world = _paired(start.world, numeric_world())
    return Replay(
        recording.step,
        _compare_statistics(recording.statistics, replayed),
        state,
        {name: pair for name, pair in world.items() if pair[0] != pair[1]},
    )


class _Rehearsal(Trainer):
    """The models of a run without its rollout, in a run folder of their own."""

    def _open(self, stack: ExitStack) -> None:
        self.learner = Learner(self.config, partial(self._open_engine, stack=stack))
        self.run.remember(**self.learner.states())

    def train(self, recording: Recording) -> dict[str, float]:
        """The step's statistics; the models are then what they were after it."""
        self.run.load(recording.point_before)
        self.learner.engine.set_version(recording.step)
        stats_tracker.export_all()  # what this process gathered before is not of the step
        data = self.learner.train([decode(blob) for blob in recording.trajectories])
        self.learner.engine.set_version(recording.step + 1)
        return {**stats_tracker.export_all(), **describe_batch(data, version=recording.step)}

    def compare_state(self, point: RecoverPoint, scratch: Path) -> list[Compared]:
        """What `point` holds against what a point of this moment would."""
        self.run.roles.capture()(scratch)
        compared = _compare_roles(point.path, scratch)
        kept = point.load()
        for name, holder in self.learner.states().items():
            pairs = _paired(kept[name], holder.state_dict())
            compared += [Compared(f"{name}/{key}", *pair) for key, pair in pairs.items()]
        return compared


def _apart(config: PPOConfig, scratch: Path) -> PPOConfig:
    """The same training in another folder, told to no tracker."""
    return replace(
        config,
        cluster=replace(config.cluster, fileroot=str(scratch)),
        stats_logger=StatsLoggerConfig(),
        perf_tracer=PerfTracerConfig(),
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sums over other numbers of threads round in other places."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_statistics(
    recorded: Mapping[str, float], replayed: Mapping[str, float]
) -> list[Compared]:
    """Those of training; times, and counts of the rollout, are of their moment."""
    names = {name for name in recorded if name.startswith(_LEARNED)}
    names |= {name for name in replayed if not name.startswith("timeperf/")}
    names = {name for name in names if not name.endswith("__count")}
    return [Compared(name, recorded.get(name), replayed.get(name)) for name in sorted(names)]


def _compare_roles(recorded: Path, replayed: Path) -> list[Compared]:
    """One entry for the weights of a role, one for its moments, and so on."""
    compared = []
    for role in sorted(folder.name for folder in replayed.iterdir()):
        pairs = _paired(digests(recorded / role), digests(replayed / role))
        by_kind = {name: name.partition(".")[0] for name in pairs}
        for kind in sorted(set(by_kind.values()), reverse=True):  # weights are the first
            names = [name for name in pairs if by_kind[name] == kind]
            compared.append(_compare_tensors(role, kind, {name: pairs[name] for name in names}))
    return compared


def _compare_tensors(role: str, kind: str, pairs: Mapping[str, tuple[str, str]]) -> Compared:
    """All of one kind at once; where some differ, the first that does."""
    for name, pair in pairs.items():
        if pair[0] != pair[1]:
            return Compared(f"{role}: {name}", *pair)
    together = hashlib.sha256("".join(digest for digest, _ in pairs.values()).encode()).hexdigest()
    return Compared(f"{role}: {kind} [{len(pairs)}]", together, together)


def _paired(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(recorded.keys() | replayed.keys())
    return {name: (recorded.get(name), replayed.get(name)) for name in names}


def _bits(value: float | str | None) -> str | None:
    """Equal for equal bits: NaN is itself, and -0 is not 0."""
    return value if isinstance(value, str | None) else float(value).hex()
