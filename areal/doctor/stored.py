"""`areal doctor RUN`: computes a stored step again and compares it with what the run recorded.

    run.db           statistics of all steps; trajectories of the newest, with their versions; what
                     the run itself found of servers and trainer after some weight updates
    recover points   weights and optimizers before and after them
    data set         the rows of the prompts

Looks at the newest step with its trajectories and the recover point before it. Log-probabilities
are computed again for stored tokens of a version whose weights are kept; where there are none, as
staleness is often older than the kept points, the run's own looks stand alone. Without such a step
these and the statistics are looked at. Nothing in the folder changes, and the run may be alive.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areal.api.config.inference import GenerationHyperparameters
from areal.api.scratch import ScratchFolder
from areal.doctor.engines import check_recorded
from areal.doctor.episodes import Spans, check_loss_mask, prompts_are_sent, rows_of
from areal.doctor.learning import check_advantages, check_alignment, check_optimizer, take_step
from areal.doctor.report import Chart
from areal.doctor.rewards import check_rewards
from areal.doctor.text import check_text
from areal.rollout.event_loop import TaskRunner
from areal.rollout.ledger_balance import read_sampled_by
from areal.rollout.source import Prompt, PromptSource
from areal.rollout.trajectory import decode
from areal.run.database import Look, open_read_only, read_looks, read_steps
from areal.run.paths import RunPaths
from areal.trainer.experiment import load_datasets
from areal.trainer.probe import Agreement, compare_logprobs, tolerance_of
from areal.trainer.recording import Recording, newest_recording
from areal.trainer.replay import Rehearsal, apart
from areal.utils.data import concat_padded_tensors

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig

_LOOK_LIVE = (
    "look at the transport (actor.weight_update_mode) and the server's options; areal doctor "
    "CONFIG finds the tensor or layer that differs"
)
_MAX_TRAJECTORIES = 64  # of other steps, of which log-probabilities are computed again
_PATIENCE = 10  # steps without a signal that are not bad luck
# Statistics of the step that training alone decides, and the stage that computes them.
_COMPARED = {
    "actor/advantages/avg": "advantages",
    "actor/advantages/max": "advantages",
    "actor/advantages/min": "advantages",
    "actor/loss": "optimizer",
    "actor/grad_norm": "optimizer",
    "actor/lr": "optimizer",
}


def examine_run(folder: Path) -> Chart:
    """ValueError or FileNotFoundError if the folder is not that of a PPO run with steps."""
    chart, paths = Chart(), RunPaths(folder.absolute())
    with closing(open_read_only(paths.database)) as connection:
        steps = [stats for step, stats in read_steps(connection) if step >= 0]
        looks = read_looks(connection)
    if not steps:
        raise ValueError(f"{folder} has not trained a step yet; give its config instead")
    check_history(chart, steps)
    _examine_step(chart, folder)
    check_looks(chart, looks)
    return chart


def _examine_step(chart: Chart, folder: Path) -> None:
    """The newest that can be computed again."""
    try:
        recording = newest_recording(folder)
    except ValueError as error:
        return chart.unseen("tokens", str(error))
    trajectories = [decode(data) for data in recording.trajectories]
    prompts = _prompts(chart, recording)
    check_loss_mask(chart, _masks(recording, trajectories))
    with ScratchFolder("doctor") as scratch:
        rows = [{}] * recording.start.dataset_size  # counted, never read
        with Rehearsal(apart(recording.config, scratch), rows) as rehearsal:
            _check_texts(chart, recording.config, rehearsal.tokenizer, prompts, trajectories)
            _check_logprobs(chart, rehearsal, recording, trajectories)
            _check_step(chart, rehearsal, recording, trajectories)


def check_looks(chart: Chart, looks: Sequence[Look]) -> None:
    """What the run found after weight updates. The newest look at a stage counts: a process that
    was started again may have mended what an earlier one found."""
    for stage in ("weights", "logits"):
        seen = [one for one in looks if one.stage == stage]
        if not seen:
            continue
        newest = seen[-1]
        text = f"in the run, after the update to version {newest.version}: {newest.found}"
        earlier = [one.version for one in seen[:-1] if one.state == "fault"]
        if newest.state == "fault":
            chart.fault(stage, text, change=_LOOK_LIVE)
        elif newest.state == "unseen":
            chart.unseen(stage, text)
        elif earlier:
            chart.ok(stage, f"{text}; that to version {earlier[-1]} had a fault")
        else:
            chart.ok(stage, text)


def check_history(chart: Chart, steps: Sequence[Mapping[str, float]]) -> None:
    """Statistics that say by themselves that nothing is learned."""
    newest = steps[-_PATIENCE:]
    spreads = [one.get("rollout/groups_with_spread", math.nan) for one in newest]
    if len(newest) == _PATIENCE and all(spread == 0 for spread in spreads):
        chart.fault(
            "reward",
            f"in the last {_PATIENCE} steps no two samples of a prompt had different rewards, so "
            "all advantages are 0",
            change="look at samples (rollout.dump_to_file=true) and the reward function; a task "
            "that is too hard needs a warm start, one that is solved harder prompts",
        )
    skipped = [one for one in newest if one.get("actor/update_successful", 1) < 1]
    if len(skipped) * 2 > len(newest):
        chart.fault(
            "optimizer",
            f"{len(skipped)} of the last {len(newest)} updates were skipped, because the gradient "
            "was not finite",
            change="look for infinities in rewards, loss and log-probabilities",
        )


def _prompts(chart: Chart, recording: Recording) -> list[Prompt]:
    """The rows of the trajectories; empty if the data set is not what it was."""
    config = recording.config
    try:
        rows = load_datasets(config)[0]
    except (ValueError, OSError) as error:
        chart.unseen("reward", f"the data set cannot be loaded: {error}")
        return []
    if len(rows) != recording.start.dataset_size:
        chart.unseen(
            "reward", f"the data set has {len(rows)} rows, it had {recording.start.dataset_size}"
        )
        return []
    dataset = config.train_dataset
    source = PromptSource(
        rows,
        batch_size=dataset.batch_size,
        seed=config.seed,
        shuffle=dataset.shuffle,
        drop_last=dataset.drop_last,
    )
    return [source.prompt(task_id) for task_id in recording.task_ids]


def _check_texts(
    chart: Chart,
    config: PPOConfig,
    tokenizer: Any,
    prompts: list[Prompt],
    trajectories: list[dict[str, Any]],
) -> None:
    """Tokenizer, template, parser, tokens of the prompts, and rewards."""
    chats = [prompt.data["messages"] for prompt in prompts if "messages" in prompt.data]
    check_text(chart, config, tokenizer, chats)
    if not prompts:
        return
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        if not prompts_are_sent(
            chart, config, tokenizer, [prompt], trajectory["input_ids"].tolist()
        ):
            break
    else:
        chart.ok("tokens", f"{len(prompts)} trajectories begin with the prompts of their rows")
    runner = TaskRunner("doctor")
    runner.start()
    try:
        check_rewards(chart, config, runner, tokenizer, prompts, trajectories)
    finally:
        runner.close()


def _masks(
    recording: Recording, trajectories: list[dict[str, Any]]
) -> Iterator[tuple[str, torch.Tensor, Spans]]:
    """Sampled tokens are those that name a version."""
    for task_id, trajectory in zip(recording.task_ids, trajectories, strict=True):
        for name, row in rows_of(task_id, trajectory):
            yield name, row["loss_mask"], _runs((row["versions"] >= 0).tolist())


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    start = None
    for place, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            yield start, place
            start = None


def _check_logprobs(
    chart: Chart, rehearsal: Rehearsal, recording: Recording, trajectories: list[dict[str, Any]]
) -> None:
    """Of the tokens of a version, by the weights of that version."""
    config = recording.config
    chart.unseen("sampling", "requests are not stored; give the config to look at them")
    if not _samples_plainly(config.gconfig):
        return chart.unseen("logits", "log-probabilities are of a cut or changed distribution")
    found = _tokens_of_known_weights(recording, trajectories)
    if found is None:
        why = "no recover point has the weights of a stored token, and the run did not look itself"
        chart.unseen("weights", why)
        return chart.unseen("logits", why)
    version, trajectories, batch = found
    agreements = _agreements(rehearsal, recording, batch, version)
    agreement = agreements[version]
    text = f"version {version}: {agreement}"
    if agreement.holds:
        chart.ok("weights", f"tokens were sampled by the weights of version {version}")
        chart.ok("logits", text)
        return _check_routing(chart, rehearsal, trajectories, version)
    stale = [older for older, one in agreements.items() if older < version and one.holds]
    if stale:
        return chart.fault(
            "weights",
            f"tokens that name version {version} were sampled by the weights of version "
            f"{max(stale)}: the servers had stale weights",
            change="look at the transport (actor.weight_update_mode); areal doctor CONFIG "
            "compares tensor by tensor",
        )
    chart.fault("logits", text, change="areal doctor CONFIG finds the first layer that differs")


def _tokens_of_known_weights(
    recording: Recording, trajectories: list[dict[str, Any]]
) -> tuple[int, list[dict[str, Any]], dict[str, torch.Tensor]] | None:
    """A version whose weights are kept, trajectories with tokens of it, and these as one batch.

    Tokens of a version are trained on up to `max_head_offpolicyness` steps later, so those of a
    recover point may be in the batches of later steps, or wait for theirs.
    """
    batch = _compared_batch(trajectories)
    version = known_version(batch, recording.points)
    if version is not None:
        return version, trajectories, batch
    for known in (*sorted((step + 1 for step in recording.points), reverse=True), 0):
        with closing(open_read_only(recording.database)) as connection:
            stored = read_sampled_by(connection, known, _MAX_TRAJECTORIES)
        if not stored:
            continue
        others = [decode(data) for data in stored]
        batch = _compared_batch(others)
        if known_version(batch, {known - 1}) == known:
            return known, others, batch
    return None


def _compared_batch(trajectories: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return concat_padded_tensors([_compared_part(one) for one in trajectories])


def _samples_plainly(gconfig: GenerationHyperparameters) -> bool:
    plain = GenerationHyperparameters()
    keys = ("greedy", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
    keys += ("repetition_penalty", "logit_bias")
    return all(getattr(gconfig, key) == getattr(plain, key) for key in keys)


def _compared_part(trajectory: dict[str, Any]) -> dict[str, torch.Tensor]:
    keys = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
    return {key: trajectory[key] for key in keys}


def known_version(batch: Mapping[str, torch.Tensor], points: Container[int]) -> int | None:
    """The newest version of a trained token whose weights are known: those of version 0 are the
    model's, `points` are the steps of recover points."""
    named = batch["versions"][_trained(batch)].unique().tolist()
    return next((one for one in reversed(named) if one == 0 or one - 1 in points), None)


def _trained(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sampled tokens, without padding [B, S]."""
    return batch["loss_mask"].bool() & batch["attention_mask"].bool()


def _agreements(
    rehearsal: Rehearsal, recording: Recording, batch: Mapping[str, torch.Tensor], version: int
) -> dict[int, Agreement]:
    """Of the tokens of `version`, with the weights of it and, if these do not fit, of older ones.
    The weights of `version` are loaded if they fit."""
    tolerance, engine = tolerance_of(recording.config), rehearsal.learner.engine
    batch = {**batch, "loss_mask": _trained(batch) & (batch["versions"] == version)}
    found = {0: compare_logprobs(engine, batch, tolerance)}  # nothing was loaded yet
    for older in range(version, 0, -1):
        if version in found and found[version].holds:
            break
        if older - 1 in recording.points:
            rehearsal.run.load(recording.points[older - 1])
            found[older] = compare_logprobs(engine, batch, tolerance)
    return found


def _check_routing(
    chart: Chart, rehearsal: Rehearsal, trajectories: list[dict[str, Any]], version: int
) -> None:
    for trajectory in trajectories:
        for _, row in rows_of(0, trajectory):
            versions = row["versions"]
            if bool(((versions == version) | (versions < 0)).all()):
                return check_recorded(chart, rehearsal.learner.engine, row)


def _check_step(
    chart: Chart, rehearsal: Rehearsal, recording: Recording, trajectories: list[dict[str, Any]]
) -> None:
    """Train the step again."""
    rehearsal.run.load(recording.point_before)
    rehearsal.learner.engine.set_version(recording.step)
    step = take_step(rehearsal.learner, trajectories)
    check_advantages(chart, recording.config, step)
    check_alignment(chart, step)
    check_optimizer(chart, recording.config, step)
    if step.own_rewards:
        return
    scale = tolerance_of(recording.config)
    for name, stage in _COMPARED.items():
        then, now = recording.statistics.get(name), step.stats.get(name)
        if then is None or now is None or math.isclose(then, now, rel_tol=scale, abs_tol=scale):
            continue
        return chart.fault(
            stage,
            f"{name} of step {recording.step} was {then:.4g}, computed again it is {now:.4g}",
            change="areal replay shows what else differs; other code or changed trajectories "
            "explain it",
        )
