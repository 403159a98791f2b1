"""Alarms over a run: each names its cause, what was seen and what to change.

    find_alarms(run)      # [Alarm], the gravest first

A rule compares the newest steps with the first or the best ones; with fewer than `_MIN_STEPS`
steps the rules over time are silent.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.dashboard.dialogues import DialogueIndex
from areal.dashboard.reader import RunReader, StepRow
from areal.dashboard.seconds import SERVER_SIZES, server_kind

_MIN_STEPS = 20
_WINDOW = 10  # steps that a rule averages over
_MAX_POINTS = 400  # steps that the rules read
_RESTARTS = 3  # of servers in the newest `_RECENT` steps
_RECENT = 50
_EPISODES = 50  # newest ones searched for a tool call
_MIN_FREE = 0.05  # share of the disk
_STALL = 10  # times the usual time of a step
LEVELS = ("alarm", "warning", "note")  # a note: nothing is wrong, and it could be better


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    level: str  # alarm, warning, note
    text: str  # what was seen
    advice: str


Rule = Callable[[Sequence[StepRow], Mapping[str, Any]], Alarm | None]


def find_alarms(run: RunReader, now: float | None = None) -> list[Alarm]:
    rows = [row for row in run.steps(max_points=_MAX_POINTS) if row.step >= 0]
    recent = [row for row in run.steps(last=_RECENT) if row.step >= 0]
    config = run.config()
    found: list[Alarm | None] = []
    if len(recent) >= _MIN_STEPS:
        rows = [row for row in rows if row.step < recent[0].step] + recent
        found += [rule(rows, config) for rule in OVER_TIME]
        found += [rule(recent, config) for rule in RECENT]
    found += [no_tool_fired(run), disk_filling(run), stalled(run, recent, now or time.time())]
    alarms = [alarm for alarm in found if alarm is not None]
    return sorted(alarms, key=lambda alarm: LEVELS.index(alarm.level))


def reward_collapse(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    values = _values(rows, "rollout/reward")
    if len(values) < _MIN_STEPS:
        return None
    means = [_mean(values[i : i + _WINDOW]) for i in range(len(values) - _WINDOW + 1)]
    best, worst, now = max(means), min(means), means[-1]
    spread = best - worst
    if spread < 0.05 * max(1e-6, abs(best)) or best - now < 0.5 * spread or now > 0.7 * abs(best):
        return None
    return Alarm(
        "reward collapse",
        "alarm",
        f"reward was {best:.3g} at its best and is {now:.3g} now (means of {_WINDOW} steps)",
        "resume from a recover point before the fall with a lower actor.optimizer.lr; look at the "
        "newest samples for outputs that cheat the reward, and at entropy and mismatch",
    )


def entropy_collapse(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    first, now = _ends(rows, "actor/entropy/avg")
    if first is None or now is None or now > 0.1 * first:
        return None
    return Alarm(
        "entropy collapse",
        "warning",
        f"entropy fell from {first:.3g} to {now:.3g} nats per token",
        "all samples of a prompt become equal and teach nothing: raise actor.eps_clip_higher or "
        "gconfig.temperature, lower the learning rate, or stop here if the reward is good",
    )


def mismatch_drift(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    for key, bound in (("actor/behave_kl/avg", 0.1), ("actor/importance_weight/avg", 0.2)):
        values = _values(rows, key)[-_WINDOW:]
        centre = 1.0 if "weight" in key else 0.0
        drift = abs(_mean(values) - centre) if values else 0.0
        if drift > bound:
            return Alarm(
                "mismatch drift",
                "alarm",
                f"{key} is {_mean(values):.3g}, {drift:.2g} away from {centre:g}: the weights that "
                "train and those that sampled disagree",
                "lower rollout.max_head_offpolicyness or actor.optimizer.lr; see that servers "
                "and trainer use the same dtype and the same chat template",
            )
    return None


def kl_drift(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    for key in ("actor/kl_ref/avg", "actor/kl_loss/avg"):
        first, now = _ends(rows, key)
        if first is not None and now is not None and now > 1.0 and now > 5 * abs(first):
            return Alarm(
                "KL drift",
                "warning",
                f"{key} rose from {first:.3g} to {now:.3g}",
                "the policy leaves its reference: raise actor.kl_ctl or actor.kl_loss_coef, or "
                "lower the learning rate",
            )
    return None


def truncation_rising(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    first, now = _ends(rows, "rollout/no_eos")
    if first is None or now is None or now < 0.2 or now < 2 * first:
        return None
    return Alarm(
        "truncation rising",
        "warning",
        f"{now:.0%} of the samples end at the limit of tokens, {first:.0%} did at the start",
        "raise gconfig.max_new_tokens, penalise length (actor.overlong_reward_penalty), or see "
        "whether outputs repeat themselves",
    )


def staleness_at_the_bound(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    bound = config.get("rollout.max_head_offpolicyness")
    values = _values(rows, "rollout/staleness")[-_WINDOW:]
    if not isinstance(bound, int) or bound < 1 or not values or _mean(values) < 0.95 * bound:
        return None
    # Where training is the slower half this is how a healthy run looks, unless work is lost.
    stale = _values(rows, "rollout/stale")
    lost = stale[-1] - stale[0] if stale else 0
    text = f"tokens are {_mean(values):.2g} versions old on average, the bound is {bound}"
    return Alarm(
        "staleness at the bound",
        "warning" if lost > 0 else "note",
        f"{text}; {lost:g} prompts were too old to be trained on" if lost > 0 else text,
        "generation is ahead and waits for the trainer: a lower rollout.max_head_offpolicyness "
        "trains on fresher tokens at the same speed",
    )


def servers_replaced(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    values = _values(rows, "server/restarts")
    new = values[-1] - values[0] if values else 0
    if new < _RESTARTS:
        return None
    cache = SERVER_SIZES[server_kind(config)]["cache"]
    return Alarm(
        "servers replaced",
        "alarm",
        f"{new:g} inference servers were replaced in the last {len(values)} steps",
        f"look at the end of logs/server*.log: out of memory is the usual cause ({cache})",
    )


def failures_rising(rows: Sequence[StepRow], config: Mapping[str, Any]) -> Alarm | None:
    failed, accepted = _values(rows, "rollout/failed"), _values(rows, "rollout/accepted")
    if not failed or not accepted:
        return None
    new, done = failed[-1] - failed[0], accepted[-1] - accepted[0]
    if new < 3 or new < 0.05 * (new + done):
        return None
    return Alarm(
        "episodes fail",
        "warning",
        f"{new:g} groups failed in the last {len(rows)} steps, {new / (new + done):.0%} of all",
        "areal ledger RUN lists the reasons",
    )


OVER_TIME: tuple[Rule, ...] = (reward_collapse, entropy_collapse, kl_drift, truncation_rising)
RECENT: tuple[Rule, ...] = (
    mismatch_drift,
    staleness_at_the_bound,
    servers_replaced,
    failures_rising,
)


def no_tool_fired(run: RunReader) -> Alarm | None:
    """Only where agents' episodes are kept (rollout.dump_to_file)."""
    episodes = DialogueIndex(run.paths.logs).newest(_EPISODES)
    with_tools = [one for one in episodes if any(turn.get("tools") for turn in one["turns"])]
    replies = [turn["reply"] for one in with_tools for turn in one["turns"]]
    if len(with_tools) < _EPISODES or any(reply.get("tool_calls") for reply in replies):
        return None
    return Alarm(
        "no tool fired",
        "alarm",
        f"the last {len(with_tools)} episodes had tools, and no reply called one",
        "see that rollout.agent.tool_call_parser is the format the model writes, and that its chat "
        "template shows tools",
    )


def disk_filling(run: RunReader) -> Alarm | None:
    usage = shutil.disk_usage(run.paths.root)
    if usage.free >= _MIN_FREE * usage.total:
        return None
    return Alarm(
        "disk filling",
        "alarm",
        f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.0f} GiB are free",
        "areal clean lists what can be deleted; a lower saver.keep and recover.keep write less",
    )


def stalled(run: RunReader, rows: Sequence[StepRow], now: float) -> Alarm | None:
    times = sorted(_values(rows, "timeperf/step"))
    if not times or run.summary().state != "running":
        return None
    silent_s = now - rows[-1].time
    if silent_s < max(60.0, _STALL * times[len(times) // 2]):
        return None
    return Alarm(
        "no progress",
        "alarm",
        f"the newest step ended {silent_s:.0f} s ago, steps take {times[len(times) // 2]:.1f} s",
        "logs/main.log and the logs of the servers say what it waits for",
    )


def _values(rows: Sequence[StepRow], key: str) -> list[float]:
    return [row.stats[key] for row in rows if row.stats.get(key) is not None]


def _ends(rows: Sequence[StepRow], key: str) -> tuple[float | None, float | None]:
    """Means of the first and the newest steps."""
    values = _values(rows, key)
    if len(values) < _MIN_STEPS:
        return None, None
    return _mean(values[:_WINDOW]), _mean(values[-_WINDOW:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
