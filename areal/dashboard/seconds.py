"""Where the second went: time of trainer, servers and rollout by cause, from recorded steps.

    time_by_cause(run, last=50)
    # {"trainer": [Share("waiting for episodes", 0.62, ...), ...], "servers": ..., "rollout": ...}

Each list adds up to the whole: what no cause covers is `other`. Trainer: the phases of each step.
Servers: seconds that native servers computed. Rollout: lives of the prompts trained in these steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.dashboard.reader import RunReader, StepRow

_PREFIX = "timeperf/"
_WORK = {"train": "training", "forward": "forward passes", "advantages": "advantages"}
# Phase -> its name and what to change if it is large.
_LOSSES = {
    "rollout": (
        "waiting for episodes",
        "generation is the bottleneck: add inference servers, raise "
        "rollout.max_concurrent_rollouts, allow a larger rollout.max_head_offpolicyness, or speed "
        "up tools and rewards",
    ),
    "update_weights": (
        "weight updates",
        "send weights another way (actor.weight_update_mode), or train more prompts per step",
    ),
    "evaluate": ("evaluation", "evaluate less often (evaluator.freq_steps) or on fewer rows"),
    "save": ("checkpoints", "save less often (saver.freq_steps)"),
    "recover": ("recover points", "write fewer recover points (recover.freq_steps)"),
    "bookkeeping": (
        "ledger and statistics",
        "train more prompts per step; a slow disk under the run's folder shows here too",
    ),
    "to_training": ("switching to training", "give training and generation devices of their own"),
    "to_generation": (
        "switching to generation",
        "give training and generation devices of their own",
    ),
    "other": (
        "other",
        "set perf_tracer.enabled=true to see what the controller does between its phases",
    ),
}
_NEGLIGIBLE = 0.02  # share below which a loss is not worth a word


@dataclass(frozen=True, slots=True)
class Share:
    cause: str
    seconds: float
    share: float  # of the whole of its list
    is_loss: bool
    advice: str = ""


@dataclass(frozen=True, slots=True)
class TimeByCause:
    first_step: int
    last_step: int
    trainer: list[Share]
    servers: list[Share]  # empty if not measured
    rollout: list[Share]  # of prompts, not of processes: seconds of all prompts together
    verdict: str


def time_by_cause(run: RunReader, last: int = 50) -> TimeByCause | None:
    """Of the newest `last` steps; None before the first."""
    rows = [row for row in run.steps(last=last + 1) if row.step >= 0]
    before, rows = (rows[0], rows[1:]) if len(rows) > last else (None, rows)
    rows = [row for row in rows if f"{_PREFIX}step" in row.stats]
    if not rows:
        return None
    trainer = trainer_time(rows)
    servers = server_time([*([before] if before else []), *rows])
    rollout = _rollout_time(run, rows[0].step, rows[-1].step)
    verdict = _verdict(trainer, servers)
    return TimeByCause(rows[0].step, rows[-1].step, trainer, servers, rollout, verdict)


def trainer_time(rows: Sequence[StepRow]) -> list[Share]:
    """Largest first. Phases do not overlap; a phase inside another makes the whole longer."""
    phases: dict[str, float] = {}
    for row in rows:
        for key, seconds in row.stats.items():
            if key.startswith(_PREFIX) and key != f"{_PREFIX}step":
                name = key.removeprefix(_PREFIX)
                phases[name] = phases.get(name, 0.0) + seconds
    whole = sum(row.stats[f"{_PREFIX}step"] for row in rows)
    phases["other"] = max(0.0, whole - sum(phases.values()))
    shares = []
    for name, seconds in phases.items():
        if name in _WORK:
            shares.append((_WORK[name], seconds, False, ""))
        else:
            cause, advice = _LOSSES.get(name, (name, ""))
            shares.append((cause, seconds, True, advice))
    return _shares(shares)


def server_time(rows: Sequence[StepRow]) -> list[Share]:
    """Between the first and the last row; empty if the servers do not report it, or were replaced
    in between."""
    reported = [row for row in rows if "server/busy_s" in row.stats]
    if len(reported) < 2:
        return []
    first, last = reported[0], reported[-1]
    totals = [row.stats["server/busy_s"] for row in reported]
    is_counted = totals == sorted(totals)  # a server that was replaced begins at 0 again
    busy = totals[-1] - totals[0]
    whole = (last.time - first.time) * max(1.0, last.stats.get("server/servers", 1.0))
    if not is_counted or whole <= 0:
        return []
    idle = max(0.0, whole - busy)
    advice = "see the trainer's largest loss: a server idles when no episode asks it"
    return _shares([("generating", busy, False, ""), ("no request", idle, True, advice)])


def _rollout_time(run: RunReader, first: int, last: int) -> list[Share]:
    # "+" keeps SQLite from the index of states: nearly all prompts are trained.
    (running, waiting) = run.query(
        """SELECT total(finished_at - issued_at), total(closed_at - finished_at)
           FROM tasks WHERE step BETWEEN ? AND ? AND +state = 'trained'""",
        (first, last),
    )[0]
    if running + waiting <= 0:
        return []
    advice = "prompts wait for the trainer: a lower rollout.max_head_offpolicyness trains fresher"
    return _shares(
        [
            ("generation, tools and reward", running, False, ""),
            ("finished, waiting for its step", waiting, True, advice),
        ]
    )


def _shares(parts: list[tuple[str, float, bool, str]]) -> list[Share]:
    whole = sum(seconds for _, seconds, _, _ in parts)
    shares = [
        Share(cause, seconds, seconds / whole if whole > 0 else 0.0, is_loss, advice)
        for cause, seconds, is_loss, advice in parts
    ]
    return sorted(shares, key=lambda one: -one.seconds)


def _verdict(trainer: list[Share], servers: list[Share]) -> str:
    losses = [share for share in trainer if share.is_loss]
    if not losses or losses[0].share < _NEGLIGIBLE:
        text = f"No loss above {_NEGLIGIBLE:.0%} of the trainer's time."
        idle = [share for share in servers if share.is_loss and share.share > 0.5]
        if idle:
            text += (
                f" The servers idle {idle[0].share:.0%} of it: training is the bottleneck; "
                "fewer servers or more training ranks would do."
            )
        return text
    worst = losses[0]
    text = f"Largest loss: {worst.cause}, {worst.share:.0%} of the trainer's time."
    return f"{text} To change it: {worst.advice}." if worst.advice else text
