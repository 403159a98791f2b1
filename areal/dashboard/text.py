"""What the terminal shows of runs: tables, stories of a prompt, a step and a sample, one picture.

Texts of a run are hostile here too: control characters that a terminal would obey are replaced.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from areal.dashboard.reader import RunReader
from areal.dashboard.samples import SampleFilter, find_samples, read_sample
from areal.dashboard.seconds import Share, time_by_cause
from areal.dashboard.views import life_of, now, prompt

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 20  # prompts of a step in its story


def safe(text: str) -> str:
    """Without control characters, but for line breaks and tabs."""
    return "".join(
        sign if sign in "\n\t" or unicodedata.category(sign)[0] != "C" else "�" for sign in text
    )


def one_line(text: str, width: int) -> str:
    text = " ".join(safe(text).split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {rest:02} s"


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ("run", "state", "step", "reward", "time left", "last step", "folder")
    rows = [head, *(_run_row(run) for run in runs)]
    faults = [f"{safe(run['folder'])}: {safe(run['fault'])}" for run in runs if run["fault"]]
    return "\n".join([table(rows), *faults])


def _run_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    total = "?" if run["total_steps"] is None else str(run["total_steps"])
    return (
        safe(run["name"]),
        run["state"],
        f"{run['num_steps']}/{total}",
        "-" if run["reward"] is None else f"{run['reward']:.3f}",
        duration(run["eta_s"]),
        clock(run["updated"]),
        safe(run["folder"]),
    )


def clock(unix_s: float | None) -> str:
    if unix_s is None:
        return "-"
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def prompt_story(run: RunReader, task_id: int) -> str:
    found = prompt(run, task_id)
    if found is None:
        raise ValueError(f"--prompt {task_id}: {run.paths.root} has issued no such prompt")
    lines = [f"prompt {task_id}, {found['task']['state']}"]
    lines += [f"  {clock(event['time'])}  {safe(event['text'])}" for event in found["story"]]
    samples = found["samples"]
    if not samples:
        lines.append("  no sample of it is stored: a run keeps the first group of a step")
    else:
        lines.append(f"  {one_line(samples[0]['prompt'], 200)}")
    lines += [_sample_line(sample) for sample in samples]
    return "\n".join(lines)


def _sample_line(sample: Mapping[str, Any]) -> str:
    reward = "-" if sample["reward"] is None else f"{sample['reward']:g}"
    cut = " cut" if sample["is_cut"] else ""
    where = f"{sample['task_id']}/{sample['sample']}"
    facts = f"reward {reward:<6} {sample['length']} tokens{cut}"
    return f"  {where:>10}  {facts}: {one_line(sample['output'], 120)}"


def members_table(members: Mapping[str, Any]) -> str:
    """Servers and rollout workers with their states; why there are none."""
    if members["why"]:
        return safe(members["why"])
    rows = [("server", "state", "version", "running", "waiting")]
    rows += [
        (safe(one["name"]), safe(one["state"]), *(_count(one[key]) for key in rows[0][2:]))
        for one in members["servers"]
    ]
    parts = [table(rows)]
    if members["workers"]:
        head = ("worker", "state", "pid", "groups")
        workers = [
            (safe(one["name"]), safe(one["state"]), _count(one["pid"]), _count(one["groups"]))
            for one in members["workers"]
        ]
        parts.append(table([head, *workers]))
    return "\n".join(parts)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def step_story(run: RunReader, number: int) -> str:
    row = run.step(number)
    if row is None:
        newest = run.steps(last=1)
        there = f"its newest is {newest[-1].step}" if newest else "it has none yet"
        raise ValueError(f"--step {number}: {run.paths.root} has not recorded this step; {there}")
    trained = run.tasks(step=number, limit=100_000)
    lines = [f"step {number}, ended {clock(row.time)}"]
    lines += [f"  {key:<32}{value:>14.6g}" for key, value in sorted(row.stats.items())]
    lines.append(f"prompts of this step: {len(trained)}")
    for task in trained[::-1][:_SHOWN]:
        reward = "-" if task["reward"] is None else f"{task['reward']:.3f}"
        lines.append(f"  {task['task_id']:>8}  {task['state']:<8}  reward {reward}")
    if len(trained) > _SHOWN:
        lines.append(f"  ... and {len(trained) - _SHOWN} more")
    samples = find_samples(run, SampleFilter(min_step=number, max_step=number))
    if samples:
        lines += ["stored samples:", *(_sample_line(sample) for sample in samples)]
    return "\n".join(lines)


def sample_story(run: RunReader, task_id: int, number: int) -> str:
    found = read_sample(run, task_id, number)
    if found is None:
        raise ValueError(
            f"--sample {task_id}/{number}: {run.paths.root} has not stored it; areal show RUN "
            "--step N lists the stored samples of a step"
        )
    task = run.task(task_id)
    lines = [f"sample {task_id}/{number}"]
    lines += [f"  {clock(time)}  {safe(text)}" for time, text in (life_of(task) if task else [])]
    reward = "-" if found["reward"] is None else f"{found['reward']:g}"
    lines.append(f"  reward {reward}, {found['length']} tokens trained on")
    shown = ("logprob", "ratio", "advantage", "entropy", "version")
    names = [name for name in shown if name in found]
    if found["missing"]:
        lines.append(f"  {found['missing']}")
    rows = [("token", "text", "trained", *names)]
    for i, text in enumerate(found["tokens"]):
        values = ["-" if found[name][i] is None else f"{found[name][i]:g}" for name in names]
        if not found["mask"][i]:
            values = [""] * len(names)
        rows.append((str(i), repr(safe(text)), "yes" if found["mask"][i] else "", *values))
    return "\n".join([*lines, table(rows)])


def picture(run: RunReader, width: int) -> str:
    """What `areal top` shows: numbers, prompts, time by cause, alarms, newest samples."""
    view = now(run)
    summary = view["summary"]
    total = summary["total_steps"] or 0
    lines = [
        f"{safe(summary['name'])}  {summary['state']}  step {summary['num_steps']}"
        f"{f'/{total}' if total else ''}  time left {duration(summary['eta_s'])}"
        f"  last step {clock(summary['updated'])}",
        _progress(summary["num_steps"], total, width),
    ]
    for number in view["numbers"]:
        value = "-" if number["value"] is None else f"{number['value']:.4g}"
        lines.append(f"{number['title']:<18}{value:>12}  {spark(number['spark'], width - 34)}")
    lines.append("prompts  " + "  ".join(f"{key} {n:,}" for key, n in view["prompts"].items()))
    if view["servers"]:
        parts = [
            f"{key} {'-' if value is None else f'{value:g}'}"
            for key, value in view["servers"].items()
        ]
        lines.append("servers  " + "  ".join(parts))
    if not view["members"]["why"]:
        lines += members_table(view["members"]).splitlines()
    if view["waits_for"]:
        lines.append(f"waits for {view['waits_for']}")
    spent = time_by_cause(run)
    if spent is not None:
        parts = {"trainer": spent.trainer, "servers": spent.servers, "rollout": spent.rollout}
        bars = {name: shares for name, shares in parts.items() if shares}
        lines += [f"{name}  {_bar(shares, width - 10)}" for name, shares in bars.items()]
        lines += spent.verdicts
    lines += [
        f"{alarm['level'].upper()} {alarm['kind']}: {safe(alarm['text'])}"
        for alarm in view["alarms"]
    ]
    lines += [_sample_line(one) for one in find_samples(run, SampleFilter(limit=4))]
    return "\n".join(one_line(line, width) if len(line) > width else line for line in lines)


def spark(values: Sequence[float | None], width: int) -> str:
    known = [value for value in values if value is not None][-max(width, 1) :]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in known)


def _progress(done: int, total: int, width: int) -> str:
    filled = 0 if total <= 0 else min(width, done * width // total)
    return "█" * filled + "░" * (width - filled)


def _bar(shares: Sequence[Share], width: int) -> str:
    parts = [f"{share.cause} {share.share:.0%}" for share in shares if share.share >= 0.01]
    return one_line(", ".join(parts), width)
