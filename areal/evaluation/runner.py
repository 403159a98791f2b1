"""Runs the samples of an evaluation that have no result yet, and keeps each as it ends.

    (row, sample) -> GroupRunner.run_sample (workflow, engine, reward) -> ResultStore

The episodes are those of the trainer's evaluator: the same workflow, and for sample i of row r the
same seed. On a CPU its results do not depend on how many run at once, in which order, or after how
many interruptions. A sample whose tokens are of more than one weight version, or of another one
than the evaluation's, ends the evaluation: nothing of it is counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from areal import __version__
from areal.api.config.experiment import PPOConfig
from areal.api.engine_api import EngineLostError
from areal.api.io_struct import EPISODE_KEY
from areal.api.scratch import ScratchFolder
from areal.api.workflow_api import RolloutWorkflow, is_agent
from areal.dataset import get_custom_dataset
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.native import NativeProtocol
from areal.evaluation.settings import Settings
from areal.evaluation.store import Evaluation, ResultStore, SampleResult
from areal.evaluation.targets import Target, digest, server_token
from areal.evaluation.text_episodes import (
    TEXT_KEY,
    Oracle,
    ServedAgent,
    ServedChat,
    TextSample,
    first_model,
)
from areal.reward import get_reward_fn
from areal.rollout.failures import FailureLimits, FailureMeter, describe
from areal.rollout.group import GroupRunner
from areal.rollout.trajectory import mean_reward, version_span
from areal.run.paths import RunPaths
from areal.trainer.episodes import build_workflow, refuse_images
from areal.trainer.servers import open_inference
from areal.utils.device import best_device
from areal.utils.hub import hub_name, model_folder
from areal.utils.model_files import TOKENIZER_FILES
from areal.utils.tokenizer import load_hf_tokenizer
from areal.workflow import resolve

Rows = Sequence[dict[str, Any]]


class VersionChangedError(RuntimeError):
    """The weights changed while they were evaluated."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """One target on one suite."""

    target: Target
    settings: Settings
    rows: Rows
    tokenizer: Any  # None if the target needs none
    evaluation: Evaluation

    @property
    def config(self) -> PPOConfig:
        return self.settings.config

    @property
    def num_samples(self) -> int:
        assert self.config.eval_gconfig is not None
        return self.config.eval_gconfig.n_samples


def make_plan(target: Target, settings: Settings, *, limit: int | None = None) -> EvalPlan:
    """Loads rows and tokenizer. `limit`: only so many rows, the first ones."""
    config = settings.config
    _point_at(config, target)
    tokenizer = None
    if target.kind in ("model", "native"):
        tokenizer = load_hf_tokenizer(config.tokenizer_path)
    section = config.valid_dataset
    assert section is not None
    loaded = get_custom_dataset(section.split, section, tokenizer)
    rows = [loaded[i] for i in range(min(len(loaded), limit or len(loaded)))]
    _refuse_images(target, config, rows)
    identity = _identity(target, config, rows)
    evaluation = Evaluation(digest(identity), target.name, target.step, settings.suite, identity)
    return EvalPlan(target, settings, rows, tokenizer, evaluation)


def _refuse_images(target: Target, config: PPOConfig, rows: Rows) -> None:
    """Before anything starts. What the model of a foreign server sees is for agents to know; an
    oracle looks at nothing."""
    is_foreign_agent = target.kind == "chat" and is_agent(
        resolve.find_workflow(config.eval_workflow or config.workflow)
    )
    if target.kind != "oracle" and not is_foreign_agent:
        refuse_images(config, None, None, rows, is_eval=True)


def run_missing(
    plan: EvalPlan, store: ResultStore, on_sample: Callable[[SampleResult], None] = lambda _: None
) -> None:
    """Returns when every sample has a result. KeyboardInterrupt and kills lose those in flight."""
    missing = store.missing(plan.evaluation.id, len(plan.rows), plan.num_samples)
    if not missing:
        return
    store.begin(plan.evaluation, plan.rows)

    def keep(result: SampleResult) -> None:
        store.add(plan.evaluation.id, result)
        on_sample(result)

    with ExitStack() as stack:
        # Closed last: the engine closes its connections on the event loop that opened them.
        events = stack.enter_context(asyncio.Runner())
        engine = _open_engine(plan, stack)
        images = stack.enter_context(ScratchFolder("eval-images"))
        workflow = _workflow(plan, images)
        stack.callback(workflow.close)
        events.run(_run_all(plan, engine, workflow, missing, keep))


def _point_at(config: PPOConfig, target: Target) -> None:
    """Replace the model of the config by the target, and what belongs to training by nothing."""
    if target.kind not in ("model", "native"):
        return
    if target.kind == "model":
        config.actor.path = target.path
    if config.tokenizer_path == target.path or _has_tokenizer(target.path):
        config.tokenizer_path = target.path
    rollout = config.rollout
    rollout.api_url, rollout.workers, config.scheduler.type = [], 0, "local"
    if rollout.engine == "native" and rollout.num_servers * rollout.ranks_per_server == 1:
        config.actor.weight_update_mode = "direct"  # the engine in this process


def _has_tokenizer(path: str) -> bool:
    folder = model_folder(path, weights=False) if hub_name(path) is not None else Path(path)
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _identity(target: Target, config: PPOConfig, rows: Rows) -> dict[str, Any]:
    """All that the samples depend on. The code of reward and workflow by their files, so that a
    corrected reward does not continue with old scores."""
    assert config.eval_gconfig is not None
    sampling = asdict(config.eval_gconfig)
    del sampling["n_samples"]
    name = config.eval_workflow or config.workflow
    identity = {
        "areal": __version__,
        "weights": target.weights,
        "rows": digest(list(rows)),
        "workflow": "oracle" if target.kind == "oracle" else name,
        "workflow_kwargs": config.workflow_kwargs,
        "reward_fn": config.reward_fn,
        "source": [_source(resolve.find_workflow(name)), _source(get_reward_fn(config.reward_fn))],
        "sampling": sampling,
        "seed": config.seed,
    }
    if target.kind == "model":
        dtype = config.native.dtype or config.actor.dtype
        engine = {"backend": config.rollout.backend, "dtype": dtype, "device": best_device()}
        identity["engine"] = engine
    return identity


def _source(thing: Any) -> str:
    """Digest of the file that defines a function or class; empty if it has none."""
    try:
        file = inspect.getsourcefile(thing if callable(thing) else type(thing))
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):
        return ""


def _open_engine(plan: EvalPlan, stack: ExitStack) -> Any:
    """An InferenceEngine; None if the workflow needs none."""
    target, config = plan.target, plan.config
    if target.kind == "native":
        rollout = config.rollout
        engine = RemoteEngine(
            NativeProtocol(),
            [target.url],
            server_token(),
            request_timeout_s=rollout.request_timeout,
            request_retries=rollout.request_retries,
            setup_timeout_s=rollout.setup_timeout,
        )
        stack.callback(engine.destroy)
        engine.initialize()
        return engine
    if target.kind != "model":
        return None
    if best_device() == "cpu":  # as its server: the number of threads changes sums
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.server.threads)
    scratch = stack.enter_context(ScratchFolder("eval"))
    engine, _ = open_inference(config, RunPaths(scratch), stack, None)
    return engine


def _workflow(plan: EvalPlan, images: Path) -> RolloutWorkflow:
    target, config = plan.target, plan.config
    if target.kind in ("model", "native"):
        options = {"is_eval": True, "image_folder": images}
        return build_workflow(config, plan.tokenizer, None, None, **options)
    reward_fn = get_reward_fn(config.reward_fn)
    reward_kwargs = config.workflow_kwargs.get("reward_kwargs") or {}
    if target.kind == "oracle":
        return Oracle(reward_fn, reward_kwargs)
    name = config.eval_workflow or config.workflow
    found, token = resolve.find_workflow(name), server_token()
    if is_agent(found):
        return ServedAgent(found, config.workflow_kwargs, base=target.url, token=token)
    if name != "rlvr":
        raise ValueError(
            f"{target.name}: workflow {name!r} asks for tokens, and this server gives only text: "
            "use rlvr or an agent, or a native server (areal serve)"
        )
    assert config.eval_gconfig is not None
    return ServedChat(
        reward_fn,
        reward_kwargs,
        base=target.url,
        model=target.path or asyncio.run(first_model(target.url, token)),
        token=token,
        gconfig=config.eval_gconfig,
        timeout_s=config.rollout.request_timeout,
    )


async def _run_all(
    plan: EvalPlan,
    engine: Any,
    workflow: RolloutWorkflow,
    missing: Iterable[tuple[int, int]],
    keep: Callable[[SampleResult], None],
) -> None:
    rollout = plan.config.rollout
    failures = FailureMeter(rollout.max_failure_ratio)
    groups = GroupRunner(
        engine=engine,
        workflow=workflow,
        group_size=plan.num_samples,
        run_seed=plan.config.seed,
        is_eval=True,
        limits=FailureLimits(
            max_failure_ratio=rollout.max_failure_ratio,
            max_retries=rollout.request_retries,
            timeout_s=rollout.request_timeout,
        ),
        on_attempt_failed=failures.on_attempt_failed,
    )
    places = iter(missing)
    ended = 0

    async def work() -> None:
        nonlocal ended
        for row, sample in places:  # shared: each place is taken once
            result = await _one(plan, groups, row, sample, failures)
            keep(result)
            ended += 1
            if failures.error is not None:
                raise failures.error

    in_flight = (rollout.max_concurrent_rollouts or 1) * plan.num_samples
    workers = [asyncio.create_task(work(), name=f"evaluate-{i}") for i in range(in_flight)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    failures.check(ended=ended)


async def _one(
    plan: EvalPlan, groups: GroupRunner, row: int, sample: int, failures: FailureMeter
) -> SampleResult:
    """Boundary: an episode that fails is a result of its own, never a reward."""
    try:
        result = await groups.run_sample(row, sample, plan.rows[row])
        read = _read(plan, row, sample, result)
    except (VersionChangedError, EngineLostError):
        raise
    except Exception as error:
        failures.on_group_failed(error)
        return SampleResult(row, sample, "failed", None, why=describe(error))
    failures.on_group_succeeded()
    return read


def _read(plan: EvalPlan, row: int, sample: int, result: dict[str, Any] | None) -> SampleResult:
    if result is None:
        return SampleResult(row, sample, "rejected", None, why="the workflow rejected it")
    if TEXT_KEY in result:
        text: TextSample = result[TEXT_KEY]
        state = "truncated" if text.is_truncated else "scored"
        return SampleResult(row, sample, state, text.reward, "", text.completion, text.num_tokens)
    reward = mean_reward(
        {**result, EPISODE_KEY: torch.zeros(len(result["input_ids"]), dtype=torch.int32)}
    )
    if reward is None:
        raise ValueError(f"the workflow gave no rewards, got only {', '.join(result)}")
    cut = "seq_no_eos" in result and bool(result["seq_no_eos"][-1])
    said = result["loss_mask"].bool() if "loss_mask" in result else result["attention_mask"].bool()
    return SampleResult(
        row,
        sample,
        "truncated" if cut else "scored",
        reward,
        completion=plan.tokenizer.decode(
            result["input_ids"][-1][said[-1]], skip_special_tokens=True
        ),
        num_tokens=int(said.sum()),
        version=_version(plan, result),
    )


def _version(plan: EvalPlan, result: dict[str, Any]) -> int | None:
    """The one version of all tokens, which for a server is the one it had when it was found."""
    span = version_span(result)
    if span is None:
        return None
    expected = plan.target.weights.get("version", span[0])
    if span != (expected, expected):
        raise VersionChangedError(
            f"{plan.target.name}: its weights changed during the evaluation (version {expected} "
            f"when it began, tokens of versions {span[0]} to {span[1]}); samples so far are kept "
            "as those of the old version: evaluate a checkpoint, or hold the server's weights"
        )
    return expected
