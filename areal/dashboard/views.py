"""The views of the dashboard as JSON values: what `areal dash` serves and `--export` embeds.

Each function takes an open run and returns dicts, lists, texts and finite numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal.dashboard.alarms import find_alarms
from areal.dashboard.dialogues import DialogueIndex
from areal.dashboard.members import living_members
from areal.dashboard.reader import RunReader, StepRow, UnreadableRunError
from areal.dashboard.samples import (
    SampleFilter,
    count_samples,
    find_samples,
    read_group,
    read_sample,
)
from areal.dashboard.seconds import time_by_cause

MAX_POINTS = 600  # of one curve
# Numbers of the newest step on the first view: title, statistic.
_HEADLINE = (
    ("reward", "rollout/reward"),
    ("accuracy", "eval/reward"),
    ("loss", "actor/loss"),
    ("loss", "loss"),
    ("tokens per second", "tokens_per_second"),
    ("seconds per step", "timeperf/step"),
    ("staleness", "rollout/staleness"),
    ("oldest token", "rollout/staleness_max"),
    ("output tokens", "rollout/output_len"),
    ("cut off", "rollout/no_eos"),
    ("entropy", "actor/entropy/avg"),
)
_SERVERS = (
    "servers",
    "running",
    "waiting",
    "version",
    "restarts",
    "requests_resent",
    "preemptions",
)
_FAILURES = ("rollout/failed", "rollout/retried", "rollout/rejected", "rollout/stale")
_SPARK_POINTS = 120


def describe_run(folder: Path) -> dict[str, Any]:
    """Its summary; of a run that cannot be read, the reason."""
    try:
        with RunReader(folder) as run:
            return {**_clean(asdict(run.summary())), "folder": str(folder), "fault": ""}
    except (UnreadableRunError, FileNotFoundError) as error:
        name = f"{folder.absolute().parent.name}/{folder.absolute().name}"
        facts = dict.fromkeys(("total_steps", "reward", "eta_s", "updated"))
        where = {"name": name, "folder": str(folder), "process": ""}
        return {**where, **facts, "num_steps": 0, "state": "unreadable", "fault": str(error)}


def now(run: RunReader) -> dict[str, Any]:
    rows = run.steps(last=_SPARK_POINTS)
    stats = dict(rows[-1].stats) if rows else {}
    for row in rows:  # an evaluation is not in every step
        if "eval/reward" in row.stats:
            stats["eval/reward"] = row.stats["eval/reward"]
    counts = run.counts()
    summary = run.summary()
    shown = [(title, key) for title, key in _HEADLINE if key in stats]
    return {
        "summary": _clean(asdict(summary)),
        "numbers": [
            {"title": title, "key": key, "value": _finite(stats[key]), "spark": _spark(rows, key)}
            for title, key in shown
        ],
        "prompts": counts,
        "waits_for": _waits_for(run, summary.state, counts),
        "servers": {
            key: _finite(stats[f"server/{key}"]) for key in _SERVERS if f"server/{key}" in stats
        },
        "members": _members(run, summary.state),
        "failures": _failures(stats),
        "events": run.events(last=30),
        "alarms": alarms(run),
    }


def _members(run: RunReader, state: str) -> dict[str, Any]:
    if state != "running":
        return {"servers": [], "workers": [], "why": "no process runs it on this machine"}
    return living_members(run)


def _spark(rows: Sequence[StepRow], key: str) -> list[float | None]:
    return [_finite(row.stats[key]) for row in rows if key in row.stats]


def _failures(stats: Mapping[str, float]) -> list[dict[str, Any]]:
    """Counts since the process began, and by kind."""
    found = [{"kind": key, "count": stats[key]} for key in _FAILURES if stats.get(key)]
    kinds = [
        {"kind": key, "count": value}
        for key, value in stats.items()
        if value and any(key.startswith(f"{one}/") for one in _FAILURES)
    ]
    return found + sorted(kinds, key=lambda one: -one["count"])


def _waits_for(run: RunReader, state: str, counts: Mapping[str, int]) -> str:
    if state != "running":
        return "nothing: no process runs it on this machine"
    batch_size = run.config().get("train_dataset.batch_size")
    if not isinstance(batch_size, int) or not sum(counts.values()):
        return ""
    if counts["finished"] >= batch_size:
        ready = f"{counts['finished']} finished prompts are ready"
        return f"the trainer: {ready}, a step takes {batch_size}"
    return (
        f"episodes: {counts['finished']} of the {batch_size} prompts of a step are finished, "
        f"{counts['issued']} run"
    )


def seconds(run: RunReader, last: int) -> dict[str, Any] | None:
    found = time_by_cause(run, last)
    return None if found is None else _clean(asdict(found))


def alarms(run: RunReader) -> list[dict[str, Any]]:
    return [asdict(alarm) for alarm in find_alarms(run)]


def samples(run: RunReader, wanted: SampleFilter) -> dict[str, Any]:
    found = find_samples(run, wanted)
    return {"samples": _clean(found), "stored": count_samples(run), "limit": wanted.limit}


def prompts(run: RunReader, state: str | None, step: int | None, before: int | None) -> list[Any]:
    return _clean(run.tasks(state=state, step=step, before=before))


def prompt(run: RunReader, task_id: int) -> dict[str, Any] | None:
    """The ledger's row, the events of its life in order, and its stored samples."""
    task = run.task(task_id)
    if task is None:
        return None
    story = [{"time": time, "text": text} for time, text in life_of(task)]
    return _clean({"task": task, "story": story, "samples": read_group(run, task_id)})


def step(run: RunReader, number: int) -> dict[str, Any] | None:
    row = run.step(number)
    if row is None:
        return None
    kept = find_samples(run, SampleFilter(min_step=number, max_step=number, limit=1000))
    return _clean({**asdict(row), "prompts": run.tasks(step=number, limit=1000), "samples": kept})


def life_of(task: Mapping[str, Any]) -> list[tuple[float, str]]:
    """(Unix time, what happened) of one prompt, in order."""
    attempt = "" if task["attempts"] == 1 else f", attempt {task['attempts']}"
    life = [
        (
            task["issued_at"],
            f"issued at version {task['issued_version']}: epoch {task['epoch']}, "
            f"row {task['row']} of the data set{attempt}",
        )
    ]
    if task["finished_at"] is not None:
        span = ""
        if task["head_version"] is not None:
            span = f", tokens of versions {task['head_version']} to {task['tail_version']}"
        reward = "" if task["reward"] is None else f", mean reward {task['reward']:.4g}"
        took = task["finished_at"] - task["issued_at"]
        life.append((task["finished_at"], f"generated in {took:.2f} s{span}{reward}"))
    if task["closed_at"] is not None:
        end = {
            "trained": f"trained in step {task['step']}",
            "stale": "dropped: too old for its batch",
        }.get(task["state"], f"{task['state']}: {task['why'] or 'no reason recorded'}")
        life.append((task["closed_at"], f"{end}, at version {task['closed_version']}"))
    return life


def sample(run: RunReader, task_id: int, number: int) -> dict[str, Any] | None:
    """Its tokens, and the dialogue of its episode where agents' episodes are kept."""
    found = read_sample(run, task_id, number)
    episode = DialogueIndex(run.paths.logs).read(
        task_id, number if found is None else found["episode"]
    )
    if found is None and episode is None:
        return None
    turns = [] if episode is None else episode.turns
    return {
        **_clean(found or {"task_id": task_id, "sample": number, "tokens": []}),
        "turns": [
            {
                "id": turn.id,
                "parent": turn.parent,
                # What the parent's turn does not show already.
                "messages": _clean(turn.messages[_known(turn, turns) :]),
                "reply": _clean(turn.reply),
                "reward": _finite(turn.reward),
                "stop_reason": turn.stop_reason,
                "num_tokens": len(turn.output_ids),
            }
            for turn in turns
        ],
    }


def _known(turn: Any, turns: Sequence[Any]) -> int:
    parent = next((one for one in turns if one.id == turn.parent), None)
    return 0 if parent is None else min(len(parent.messages) + 1, len(turn.messages))


def keys(run: RunReader) -> list[str]:
    """Statistics that can be drawn."""
    rows = run.steps(last=20)
    return sorted({key for row in rows for key in row.stats})


def curves(run: RunReader, wanted: Sequence[str] = ()) -> dict[str, Any]:
    """Values of the statistics `wanted` (default: all) at at most `MAX_POINTS` steps, and where
    each step is on the three axes."""
    rows = run.steps(max_points=MAX_POINTS)
    tokens, before = 0.0, -1
    axes: dict[str, list[float]] = {"step": [], "tokens": [], "hours": []}
    for row in rows:
        # Steps that were left out had about as many tokens.
        tokens += row.stats.get("tokens", 0.0) * max(1, row.step - before)
        before = row.step
        axes["step"].append(row.step + 1)
        axes["tokens"].append(tokens)
        axes["hours"].append((row.time - rows[0].time) / 3600)
    names = wanted or sorted({key for row in rows for key in row.stats})
    values = {key: [_finite(row.stats.get(key)) for row in rows] for key in names}
    return {"axes": _clean(axes), "values": values}


def diff(first: RunReader, second: RunReader) -> list[dict[str, Any]]:
    """Config keys with different values."""
    ours, theirs = first.config(), second.config()
    absent = "(absent)"
    return [
        {"key": key, "first": str(ours.get(key, absent)), "second": str(theirs.get(key, absent))}
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, absent) != theirs.get(key, absent)
    ]


def config(run: RunReader) -> dict[str, str]:
    return {key: str(value) for key, value in run.config().items()}


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _clean(value: Any) -> Any:
    """Without NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {key: _clean(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_clean(one) for one in value]
    return value
