"""A few real episodes with every request recorded: tokens, sampling parameters, loss mask.

    episodes = run_episodes(trainer, workflow, num_prompts=4)
    check_tokens(chart, trainer.config, trainer.tokenizer, episodes)
    check_sampling(chart, trainer.config, episodes)
    check_loss_mask(chart, episodes.masks())

The recorder stands between the workflow and the engine and passes everything on, so it knows which
tokens were sent and which came back, whatever the workflow made of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from areal.doctor.report import Chart
from areal.engine.train.fit import VISION_WORKFLOWS
from areal.rollout.source import Prompt
from areal.trainer.episodes import trial_groups
from areal.trainer.probe import MAX_PROMPT
from areal.utils.tokenizer import chat_prompt_ids
from areal.workflow import WORKFLOWS

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.api.workflow_api import RolloutWorkflow
    from areal.trainer.rl_trainer import PPOTrainer

_CUTS = ("top_p", "top_k", "min_p")  # of the distribution that tokens are drawn from
_UNBELIEVABLE = math.log(1e-9)

Spans = Iterable[tuple[int, int]]  # first token of a reply, and the one after its last


@dataclass(frozen=True, slots=True)
class Episodes:
    prompts: list[Prompt]
    trajectories: list[dict[str, Any]]  # of each prompt
    calls: list[tuple[ModelRequest, ModelResponse]]

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and tensors, without padding, of every row."""
        for prompt, trajectory in zip(self.prompts, self.trajectories, strict=True):
            yield from rows_of(prompt.task_id, trajectory)

    def short_prompts(self, count: int) -> list[list[int]]:
        """The tokens of different requests, at most `count`."""
        sent = {tuple(request.input_ids): None for request, _ in self.calls}
        return [list(ids) for ids in sent if len(ids) <= MAX_PROMPT][:count]

    def masks(self) -> Iterator[tuple[str, torch.Tensor, Spans]]:
        """For `check_loss_mask`."""
        for name, row in self.rows():
            yield name, row["loss_mask"], _spans(row["input_ids"].tolist(), self.calls)


def rows_of(task_id: int, trajectory: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for row, length in enumerate(trajectory["attention_mask"].sum(1).tolist()):
        tensors = {
            key: value[row, :length] if value.dim() > 1 else value[row]
            for key, value in trajectory.items()
            if isinstance(value, torch.Tensor)
        }
        yield f"row {row} of prompt {task_id}", tensors


def run_episodes(trainer: PPOTrainer, workflow: RolloutWorkflow, num_prompts: int) -> Episodes:
    """The groups of the run's first prompts. An exception of an episode is raised; a prompt that
    the workflow rejects is left out."""
    config = trainer.config
    recorder = RecordingEngine(trainer.inference)
    groups = trial_groups(config, recorder, workflow)
    prompts = [trainer.source.prompt(task_id) for task_id in range(num_prompts)]

    async def run() -> list[dict[str, Any] | None]:
        async with asyncio.timeout(config.rollout.request_timeout):
            return await asyncio.gather(*(groups.run(p.task_id, p.data) for p in prompts))

    results = trainer.runner.run(run()).result()
    kept = [(p, t) for p, t in zip(prompts, results, strict=True) if t is not None]
    return Episodes([p for p, _ in kept], [t for _, t in kept], recorder.calls)


class RecordingEngine(InferenceEngine):
    """Passes every call on, and keeps requests with their replies."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.calls: list[tuple[ModelRequest, ModelResponse]] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = await self._engine.agenerate(req)
        self.calls.append((req, response))
        return response

    def initialize(self) -> None:
        """The engine is running."""

    def destroy(self) -> None:
        """Its owner does."""

    def pause_generation(self) -> None:
        self._engine.pause_generation()

    def continue_generation(self) -> None:
        self._engine.continue_generation()

    def update_weights(self, meta: WeightUpdateMeta, named_tensors: Any = None) -> None:
        self._engine.update_weights(meta, named_tensors)

    def get_version(self) -> int:
        return self._engine.get_version()

    def stats(self) -> dict[str, float]:
        return self._engine.stats()

    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        return self._engine.busy_intervals(since)


def check_tokens(chart: Chart, config: PPOConfig, tokenizer: Any, episodes: Episodes) -> None:
    """Rows hold the very tokens that were sent and sampled, and prompts are the rows' own."""
    sent = [list(request.input_ids) for request, _ in episodes.calls]
    if not prompts_are_sent(chart, config, tokenizer, episodes.prompts, sent):
        return
    for name, row in episodes.rows():
        if not any(_spans(row["input_ids"].tolist(), episodes.calls)):
            return chart.fault(
                "tokens",
                f"{name} has tokens that no request and reply had: "
                "text was tokenized again, or tokens were cut",
                change="build trajectories from the tokens of ModelResponse, never from text",
            )
    if fault := _foreign_numbers(episodes):
        return chart.fault(
            "tokens",
            fault,
            change="build trajectories from output_logprobs and output_versions of ModelResponse "
            "(areal.workflow.transcript.Transcript does)",
        )
    count = sum(1 for _ in episodes.rows())
    chart.ok("tokens", f"{count} rows hold the very tokens of {len(episodes.calls)} requests")


def _foreign_numbers(episodes: Episodes) -> str:
    """A log-probability or version that no reply had for its token; empty if there is none. Looks
    at whole replies with loss on them: other rows are for `check_loss_mask`."""
    for name, row in episodes.rows():
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].bool()
        replies: dict[tuple[int, int], list[ModelResponse]] = {}
        for start, end, reply in _replies(ids, episodes.calls):
            if end > start and bool(mask[start:end].all()):
                replies.setdefault((start, end), []).append(reply)
        for (start, end), given in replies.items():
            logprobs, versions = row["logprobs"][start:end], row["versions"][start:end].tolist()
            if not any(_close(logprobs, one.output_logprobs) for one in given):
                return f"{name} has log-probabilities that no reply had for these tokens"
            if not any(versions == one.output_versions for one in given):
                return f"{name} names weight versions that no reply had for these tokens"
    return ""


def _close(found: torch.Tensor, expected: Sequence[float]) -> bool:
    return torch.allclose(found.double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-5)


def prompts_are_sent(
    chart: Chart,
    config: PPOConfig,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    sent: Sequence[list[int]],
) -> bool:
    """Whether something was sent that begins with each prompt as the chat template writes it."""
    for prompt in prompts if _uses_template(config) else ():
        thinking = bool(config.workflow_kwargs.get("enable_thinking", False))
        expected = chat_prompt_ids(prompt.data["messages"], tokenizer, enable_thinking=thinking)
        if not any(ids[: len(expected)] == expected for ids in sent):
            chart.fault(
                "tokens",
                f"nothing begins with the tokens of row {prompt.row} as the chat template writes "
                f"them ({expected[:8]} ...)",
                change="tokenize prompts with areal.utils.tokenizer.chat_prompt_ids; a run whose "
                "data or tokenizer changed needs a new trial_name",
            )
            return False
    return True


def _uses_template(config: PPOConfig) -> bool:
    own = {"get_input_ids_fn", "data_extract_prompt_fn"} & config.workflow_kwargs.keys()
    if config.workflow in VISION_WORKFLOWS:  # an image has more tokens than the template writes
        return False
    return config.workflow in WORKFLOWS and not own and config.rollout.agent.mode != "online"


def check_sampling(chart: Chart, config: PPOConfig, episodes: Episodes) -> None:
    """Requests ask for the distribution that the config names, and samples are drawn apart."""
    wanted = config.actor.temperature
    for request, _ in episodes.calls:
        options = request.gconfig
        if options.greedy or options.temperature != wanted:
            asked = "greedy tokens" if options.greedy else f"temperature {options.temperature:g}"
            return chart.fault(
                "sampling",
                f"requests ask for {asked}, and the trainer computes log-probabilities at "
                f"temperature {wanted:g}",
                change="pass the config's gconfig to requests (or set actor.temperature and "
                "gconfig.temperature to what the workflow uses)",
            )
        for key in _CUTS:
            asked, named = getattr(options, key), getattr(config.gconfig, key)
            if asked != named:
                return chart.fault(
                    "sampling",
                    f"requests ask for {key} {asked:g}, and gconfig.{key} is {named:g}",
                    change=f"pass the config's gconfig to requests, or set gconfig.{key}",
                )
    if fault := _drawn_together(episodes):
        return chart.fault(
            "sampling",
            fault,
            change="let each sample of a group have a seed of its own (gconfig.with_seed, or none)",
        )
    chart.ok("sampling", f"{len(episodes.calls)} requests ask for temperature {wanted:g}")


def _drawn_together(episodes: Episodes) -> str:
    """Whether the replies to each prompt are all the same although, by their own log-probabilities,
    independent draws would not be."""
    replies: dict[tuple[int, ...], list[ModelResponse]] = {}
    for request, reply in episodes.calls:
        if request.gconfig.greedy:
            return ""  # nothing is drawn
        replies.setdefault(tuple(request.input_ids), []).append(reply)
    chance = 0.0  # log-probability that all later replies repeat the first
    for same_prompt in replies.values():
        if any(one.output_tokens != same_prompt[0].output_tokens for one in same_prompt[1:]):
            return ""
        chance += sum(sum(one.output_logprobs) for one in same_prompt[1:])
    if chance > _UNBELIEVABLE:
        return ""
    return (
        "all samples of a prompt are the same tokens, for every prompt: independent draws would be "
        f"so with probability 1e{chance / math.log(10):.0f}, so they share a seed"
    )


def check_loss_mask(chart: Chart, rows: Iterable[tuple[str, torch.Tensor, Spans]]) -> None:
    """Loss is on sampled tokens alone, and on whole replies: of each row its name, `loss_mask` [S]
    and where replies stand in it."""
    num_tokens = 0
    for name, mask, spans in rows:
        if fault := _mask_fault(mask.bool(), list(spans)):
            return chart.fault(
                "loss_mask",
                f"{name}: {fault}",
                change="set loss_mask to 1 exactly where the model sampled the token "
                "(areal.workflow.transcript.Transcript does)",
            )
        num_tokens += int(mask.sum())
    chart.ok("loss_mask", f"loss on {num_tokens} tokens, all of them sampled")


def _mask_fault(mask: torch.Tensor, spans: Sequence[tuple[int, int]]) -> str:
    """Empty if there is none. A reply may be left out as a whole."""
    sampled = torch.zeros_like(mask)
    for start, end in spans:
        sampled[start:end] = True
    partly = any(0 < int(mask[start:end].sum()) < end - start for start, end in spans)
    if not partly and not bool((mask & ~sampled).any()):
        return ""
    for shift, name in ((1, "early"), (-1, "late")):
        if torch.equal(mask.roll(shift), sampled):
            return f"the loss mask is one token too {name}"
    wrong = int((mask & ~sampled).sum())
    if wrong:
        return f"the loss mask has {wrong} tokens that the model did not sample"
    return f"the loss mask leaves out {int((sampled & ~mask).sum())} tokens of a reply"


def _spans(
    ids: list[int], calls: Sequence[tuple[ModelRequest, ModelResponse]]
) -> Iterator[tuple[int, int]]:
    """Where replies stand in `ids`, which begin with the prompt of each."""
    return ((start, end) for start, end, _ in _replies(ids, calls))


def _replies(
    ids: list[int], calls: Sequence[tuple[ModelRequest, ModelResponse]]
) -> Iterator[tuple[int, int, ModelResponse]]:
    """The same, with the replies."""
    for request, reply in calls:
        start, end = len(request.input_ids), len(request.input_ids) + len(reply.output_tokens)
        if ids[:start] == list(request.input_ids) and ids[start:end] == list(reply.output_tokens):
            yield start, end, reply
