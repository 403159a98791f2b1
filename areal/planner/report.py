"""A plan in words: the lines that `areal plan` prints, and its JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from areal.planner.devices import GIB, Device
from areal.planner.layouts import Split
from areal.planner.offline import OfflinePlan
from areal.planner.plan import DeviceMemory, Plan
from areal.planner.scale import ScaleRow
from areal.planner.simulate import Simulated

_MIN_PART = 0.01  # of a peak or a step: smaller parts are summed, smaller losses not named
_MIN_GAIN = 1.05  # of another split, to be worth a change


def describe(
    plan: Plan, assumed: list[str], better: Split | None, simulated: Simulated | None
) -> list[str]:
    load = plan.load
    lines = [
        f"{plan.device.name} x {plan.gpus}: training {plan.training_devices}, generation "
        f"{plan.generation_devices or 'on the same'}"
        + (f", teacher {plan.teacher_devices}" if plan.teacher_devices else ""),
        f"a step: {load.prompts} prompts x {load.samples} samples, {load.prompt} + "
        f"{load.output:g} tokens (at most {load.max_output})",
    ]
    if assumed:
        lines.append(f"assumed: {'; '.join(assumed)}")
    lines += [
        "",
        *_memory_lines(plan.memory, plan.device),
        "",
        *_time_lines(plan),
        "",
        *_advice_lines(plan, better),
    ]
    if simulated is not None:
        lines += ["", *_simulation_lines(simulated)]
    return lines


def describe_offline(plan: OfflinePlan, assumed: list[str]) -> list[str]:
    load, step = plan.load, plan.step_s
    lines = [
        f"{plan.device.name} x {plan.gpus}: training {plan.gpus}",
        f"a step: {load.num_samples} sequences of {load.prompt + load.output:g} tokens",
        *([f"assumed: {'; '.join(assumed)}"] if assumed else []),
        "",
        *_memory_lines(plan.memory, plan.device),
        "",
        f"step {duration(step)}, {plan.tokens_per_s:,.0f} tokens/s trained",
    ]
    if load.steps is not None:
        lines.append(f"{load.steps} steps: {duration(load.steps * step)}")
    share = plan.loss.device_s / step
    if share >= _MIN_PART:
        lines += ["", f"largest loss: {plan.loss.what}, {share:.0%} of the time"]
        lines.append(f"  what would help: {plan.loss.advice}")
    if plan.better is not None and plan.better.tokens_per_s >= _MIN_GAIN * plan.tokens_per_s:
        gain = plan.better.tokens_per_s / plan.tokens_per_s
        lines.append(f"a better layout: {plan.better.name} ({gain:.2f} times as fast)")
    return lines


def _memory_lines(memory: Iterable[DeviceMemory], device: Device) -> Iterable[str]:
    limit = device.memory_bytes / GIB
    yield f"memory of a device, GiB of {limit:.1f}"
    for place in memory:
        fits = "" if place.peak <= device.memory_bytes else "  does not fit"
        turns = ", in turns" if place.takes_turns else ""
        yield f"  {place.name} (x {place.count}{turns}): {place.peak / GIB:.1f}{fits}"
        for process in place.processes:
            for phase in process.phases:
                parts = process.phases[phase]
                total = sum(parts.values())
                named = {p: s for p, s in parts.items() if s >= _MIN_PART * total}
                rest = total - sum(named.values())
                text = ", ".join(f"{part} {size / GIB:.1f}" for part, size in named.items())
                other = f", rest {rest / GIB:.1f}" if rest > 0 else ""
                yield f"    {process.process}, {phase}: {total / GIB:.1f} = {text}{other}"


def _time_lines(plan: Plan) -> Iterable[str]:
    times, load = plan.times, plan.load
    yield "time of a step"
    yield (
        f"  generation {duration(times.generate)} "
        f"({load.num_samples * load.output / times.generate:,.0f} tokens/s sampled), idle "
        f"{plan.generation_idle:.0%}"
    )
    yield (
        f"  training {duration(times.train)} ({load.tokens / times.train:,.0f} tokens/s), "
        f"publication {duration(times.publish)}, idle {plan.training_idle:.0%}"
    )
    yield (
        f"  step {duration(plan.step_s)}, {plan.tokens_per_s:,.0f} tokens/s trained; bound by "
        f"{plan.bound}; staleness {plan.staleness:.1f} of at most {load.staleness}"
    )
    if plan.duration_s is not None:
        yield f"  {load.steps} steps: {duration(plan.duration_s)}"


def _advice_lines(plan: Plan, better: Split | None) -> Iterable[str]:
    loss = plan.losses[0]
    share = loss.device_s / (plan.step_s * plan.gpus)
    yield f"largest loss: {loss.what}, {share:.0%} of all GPU time"
    yield f"  what would help: {loss.advice}"
    gain = 0.0 if better is None else better.plan.tokens_per_s / plan.tokens_per_s
    if better is not None and gain >= _MIN_GAIN:
        kept = "" if better.checkpointing != "full" else " with archon.ac_mode full"
        yield (
            f"a better split: {better.allocation}{kept}, {better.plan.tokens_per_s:,.0f} tokens/s "
            f"({gain:.2f} times as fast)"
        )
    else:
        yield "no other split of these GPUs is predicted to be 5 % faster"


def _simulation_lines(simulated: Simulated) -> Iterable[str]:
    def shares(parts: dict[str, float]) -> str:
        return ", ".join(f"{part} {share:.0%}" for part, share in parts.items())

    yield f"simulated {simulated.steps} steps, {simulated.failures} failures of servers"
    yield (
        f"  step {duration(simulated.step_s)}, {simulated.tokens_per_s:,.0f} tokens/s trained, "
        f"staleness {simulated.staleness:.1f}"
    )
    yield f"  training: {shares(simulated.training)}"
    yield f"  generation: {shares(simulated.generation)}"


def duration(seconds: float) -> str:
    for limit, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def scale_table(rows: Iterable[ScaleRow]) -> list[str]:
    """Markdown."""
    lines = [
        "| model | GPUs | layout | tokens/s | tokens/s a GPU | bound by | GiB of a device |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row.split is None:
            lines.append(f"| {row.model} | {row.gpus} | does not fit | | | | |")
            continue
        plan, full = row.split.plan, " full" if row.split.checkpointing == "full" else ""
        peaks = ", ".join(f"{place.peak / GIB:.0f}" for place in plan.memory)
        lines.append(
            f"| {row.model} | {row.gpus} | `{row.split.allocation}`{full} | "
            f"{_rounded(plan.tokens_per_s):,} | {_rounded(plan.tokens_per_s / row.gpus):,} | "
            f"{plan.bound} | {peaks} |"
        )
    return lines


def _rounded(value: float) -> int:
    """Three digits: more would promise too much."""
    return int(float(f"{value:.3g}"))


def _head_json(plan: Plan | OfflinePlan, assumed: list[str]) -> dict[str, Any]:
    memory = [
        {
            "name": place.name,
            "devices": place.count,
            "peak": place.peak,
            "processes": [asdict(process) for process in place.processes],
        }
        for place in plan.memory
    ]
    return {
        "device": plan.device.name,
        "gpus": plan.gpus,
        "assumed": assumed,
        "memory_bytes": plan.device.memory_bytes,
        "memory": memory,
    }


def offline_json(plan: OfflinePlan, assumed: list[str]) -> dict[str, Any]:
    steps, better = plan.load.steps, plan.better
    return {
        **_head_json(plan, assumed),
        "fits": plan.fits,
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "duration_s": None if steps is None else steps * plan.step_s,
        "losses": [asdict(plan.loss)],
        "better_layout": None if better is None else asdict(better),
    }


def as_json(
    plan: Plan, assumed: list[str], better: Split | None, simulated: Simulated | None
) -> dict[str, Any]:
    return {
        **_head_json(plan, assumed),
        "fits": not plan.too_large(),
        "times": asdict(plan.times),
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "bound": plan.bound,
        "training_idle": plan.training_idle,
        "generation_idle": plan.generation_idle,
        "staleness": plan.staleness,
        "duration_s": plan.duration_s,
        "losses": [asdict(loss) for loss in plan.losses],
        "better_split": None
        if better is None
        else {"allocation": better.allocation, "tokens_per_s": better.plan.tokens_per_s},
        "simulated": None if simulated is None else asdict(simulated),
    }
