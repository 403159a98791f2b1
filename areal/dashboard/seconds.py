"""Where the second went: time of trainer, servers and rollout by cause, from recorded steps.

    time_by_cause(run, last=50)
    # {"trainer": [Share("waiting for episodes", 0.62, ...), ...], "servers": ..., "rollout": ...}

Each list adds up to the whole: what no cause covers is `other`.

    trainer   the phases of each step
    servers   seconds that native servers computed, or that requests were in flight at servers of
              another kind, and why not; where no request came, the clock of the rollout says
              whether episodes ran at all
    rollout   lives of the prompts trained in these steps, divided as their episodes spent theirs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

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
        "ledger and stored samples",
        "train more prompts per step; a slow disk under the run's folder shows here too",
    ),
    "statistics": ("statistics", "train more prompts per step; servers answer late that are busy"),
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
# Statistic of episodes -> cause, whether it is a loss, and what to change.
_EPISODE = {
    "generation_s": ("generating tokens", False, ""),
    "first_token_s": (
        "waiting for the first token",
        True,
        "requests queue at the servers: add servers, or raise {batch} and {cache}",
    ),
    "tool_s": (
        "tools",
        True,
        "speed up the tools or their sandboxes, or run more episodes at once "
        "(rollout.max_concurrent_rollouts)",
    ),
    "reward_s": ("rewards", True, "give the reward function more processes, or a faster one"),
}
_IDLE = {
    "paused_s": (
        "paused",
        "generation is paused for weight updates: train more prompts per step, or send weights "
        "another way (actor.weight_update_mode)",
    ),
    "offloaded_s": (
        "lent to training",
        "give training and generation devices of their own (rollout.scheduling_strategy)",
    ),
    "control_s": (
        "loading weights",
        "send weights another way (actor.weight_update_mode), or train more prompts per step",
    ),
}
_HELD = (
    "no episode may start",
    "training is the bottleneck: generation has reached rollout.max_head_offpolicyness. Fewer "
    "servers or more training ranks would do, or a larger bound",
)
_ELSEWHERE = (
    "episodes ask for nothing",
    "episodes are in tools, rewards or their own code, or too few: raise "
    "rollout.max_concurrent_rollouts, or speed them up",
)
# Kind of server -> how many requests it computes at once, and its room for them.
SERVER_SIZES = {
    "native": {"batch": "native.max_running", "cache": "native.num_pages"},
    "vllm": {"batch": "vllm.max_num_seqs", "cache": "vllm.gpu_memory_utilization"},
    "sglang": {"batch": "sglang.max_running_requests", "cache": "sglang.mem_fraction_static"},
}
_UNKNOWN = "set perf_tracer.enabled=true and look at the servers' lanes in areal trace"
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
    verdicts: list[str]  # the largest loss of each, and what to change


def time_by_cause(run: RunReader, last: int = 50) -> TimeByCause | None:
    """Of the newest `last` steps; None before the first."""
    read = (replace(row, stats=row.finite) for row in run.steps(last=last + 1))
    rows = [row for row in read if row.step >= 0]
    before, rows = (rows[0], rows[1:]) if len(rows) > last else (None, rows)
    rows = [row for row in rows if f"{_PREFIX}step" in row.stats]
    if not rows:
        return None
    trainer = trainer_time(rows)
    kind = server_kind(run.config())
    busy = "generating" if kind == "native" else "requests in flight"
    servers = server_time([*([before] if before else []), *rows], busy)
    rollout = rollout_time(run, rows, SERVER_SIZES[kind])
    verdicts = _verdicts(trainer, servers, rollout)
    return TimeByCause(rows[0].step, rows[-1].step, trainer, servers, rollout, verdicts)


def server_kind(config: Mapping[str, Any]) -> str:
    """A key of `SERVER_SIZES`."""
    kind = str(config.get("rollout.backend")).partition(":")[0]
    return kind if kind in SERVER_SIZES else "native"


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


def server_time(rows: Sequence[StepRow], busy: str = "generating") -> list[Share]:
    """Between the first and the last row, without the intervals in which a server was replaced,
    joined or left; empty if nothing is left. `busy` is what their busy seconds mean."""
    reported = [row for row in rows if "server/busy_s" in row.stats]
    spent: dict[str, float] = {}
    whole = 0.0
    for before, after in pairwise(reported):
        num_servers = after.stats.get("server/servers", 1.0)
        gains = {name: _gain(before, after, name) for name in _COUNTERS}
        # A server that was replaced begins at 0 again, also where no restart is counted.
        is_other = any(_gain(before, after, name) for name in ("server/servers", "server/restarts"))
        if is_other or gains["server/busy_s"] < 0:
            continue
        whole += (after.time - before.time) * max(1.0, num_servers)
        gains["rollout/idle_s"] *= num_servers  # all servers wait for the same rollout
        for name, gain in gains.items():
            spent[name] = spent.get(name, 0.0) + gain
    if whole <= 0:
        return []
    # Below 0 by what rollout workers told of the time before the first row.
    spent = {name: max(0.0, seconds) for name, seconds in spent.items()}
    parts = [(busy, min(whole, spent["server/busy_s"]), False, "")]
    return _shares(parts + _idle_parts(whole - parts[0][1], spent))


_COUNTERS = (
    "server/busy_s",
    "server/no_request_s",
    *(f"server/{name}" for name in _IDLE),
    "rollout/idle_s",
)


def _gain(before: StepRow, after: StepRow, name: str) -> float:
    return after.stats.get(name, 0.0) - before.stats.get(name, 0.0)


def _idle_parts(idle: float, spent: Mapping[str, float]) -> list[tuple[str, float, bool, str]]:
    """`idle` seconds by cause. Measured times may be longer by what a step's end has cut off."""
    measured = {name: spent[f"server/{name}"] for name in (*_IDLE, "no_request_s")}
    known = sum(measured.values())
    if known <= 0:  # of a server that does not say why
        return [("not generating", idle, True, _ELSEWHERE[1])]
    scale = min(1.0, idle / known)
    parts = [
        (cause, measured[name] * scale, True, advice)
        for name, (cause, advice) in _IDLE.items()
        if measured[name] > 0
    ]
    no_request = measured["no_request_s"] * scale
    held = min(no_request, spent["rollout/idle_s"])
    parts += [(_HELD[0], held, True, _HELD[1])]
    parts += [(_ELSEWHERE[0], no_request - held, True, _ELSEWHERE[1])]
    return [*parts, ("other", max(0.0, idle - known * scale), True, _UNKNOWN)]


def rollout_time(run: RunReader, rows: Sequence[StepRow], sizes: Mapping[str, str]) -> list[Share]:
    """`sizes`: the keys of `SERVER_SIZES` that the advice names."""
    # "+" keeps SQLite from the index of states: nearly all prompts are trained.
    running, waiting, num_prompts = run.query(
        """SELECT total(finished_at - issued_at), total(closed_at - finished_at), count(*)
           FROM tasks WHERE step BETWEEN ? AND ? AND +state = 'trained'""",
        (rows[0].step, rows[-1].step),
    )[0]
    running, waiting = max(0.0, running), max(0.0, waiting)  # a clock may be set back
    if running + waiting <= 0:
        return []
    advice = "prompts wait for the trainer: a lower rollout.max_head_offpolicyness trains fresher"
    return _shares(
        [
            *_episode_parts(rows, running, num_prompts, sizes),
            ("finished, waiting for its step", waiting, True, advice),
        ]
    )


def _episode_parts(
    rows: Sequence[StepRow], running: float, num_prompts: int, sizes: Mapping[str, str]
) -> list[tuple[str, float, bool, str]]:
    """`running` seconds of all prompts as their episodes spent theirs on average. A prompt runs
    until the last of its episodes has ended."""
    episode, count = _total(rows, "rollout/episode_s")
    if count == 0:
        return [("generation, tools and reward", running, False, "")]
    whole = min(running, episode / count * num_prompts)
    scale = whole / episode if episode > 0 else 0.0
    parts = [
        (cause, _total(rows, f"rollout/{name}")[0] * scale, is_loss, advice.format(**sizes))
        for name, (cause, is_loss, advice) in _EPISODE.items()
    ]
    parts = [part for part in parts if part[1] > 0]
    own = max(0.0, whole - sum(seconds for _, seconds, _, _ in parts))
    parts.append(("the workflow's own code", own, False, ""))
    slowest = "lengths differ: lower gconfig.max_new_tokens, or penalise length"
    return [*parts, ("waiting for the group's slowest sample", running - whole, True, slowest)]


def _total(rows: Sequence[StepRow], key: str) -> tuple[float, float]:
    """Sum and number of the values whose mean the steps have recorded."""
    pairs = [
        (row.stats[key], row.stats.get(f"{key}__count", 1.0)) for row in rows if key in row.stats
    ]
    return sum(mean * count for mean, count in pairs), sum(count for _, count in pairs)


def _shares(parts: list[tuple[str, float, bool, str]]) -> list[Share]:
    whole = sum(seconds for _, seconds, _, _ in parts)
    shares = [
        Share(cause, seconds, seconds / whole if whole > 0 else 0.0, is_loss, advice)
        for cause, seconds, is_loss, advice in parts
    ]
    return sorted(shares, key=lambda one: -one.seconds)


def _verdicts(trainer: list[Share], servers: list[Share], rollout: list[Share]) -> list[str]:
    texts = [_loss_text("of the trainer's time", trainer)]
    texts += [_loss_text("of the servers' time", servers)] if servers else []
    texts += [_loss_text("of the prompts' time", rollout)] if rollout else []
    return texts


def _loss_text(whole: str, shares: list[Share]) -> str:
    worst = next((share for share in shares if share.is_loss), None)  # the largest is first
    if worst is None or worst.share < _NEGLIGIBLE:
        return f"No loss above {_NEGLIGIBLE:.0%} {whole}."
    text = f"Largest loss {whole}: {worst.cause}, {worst.share:.0%}."
    return f"{text} To change it: {worst.advice}." if worst.advice else text
