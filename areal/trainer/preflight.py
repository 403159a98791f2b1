"""Checks of a run before any server starts.

    check_rows(config, rows, tokenizer)       every run: the first rows can be trained on
    run_trial(config, rows, tokenizer, say)   `areal check --trial`: one group of episodes, as in
                                              the run except for the model, which is a stub

The trial builds the workflow, its reward processes and its server for agents as a run does. The
stub replies with random tokens, so a reward of 0 is expected; an exception here would occur in the
run too.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from areal.api.config.experiment import PPOConfig
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.scratch import ScratchFolder
from areal.rollout.failures import describe
from areal.run.fingerprint import trainer_name
from areal.trainer.episodes import build_filter, build_workflow, trial_groups
from areal.utils import logging
from areal.utils.hub import model_folder
from areal.utils.model_files import language_config, read_hf_config
from areal.utils.tokenizer import chat_prompts_ids
from areal.workflow import WORKFLOWS

if TYPE_CHECKING:
    import torch

    from areal.api.config.experiment import BaseExperimentConfig

    Rows = Sequence[dict[str, Any]]

logger = logging.getLogger("Preflight")

_NUM_CHECKED = 64  # rows; more would delay every start
_MAX_STUB_TOKENS = 16
_ROW_KEYS = {
    "sft": ("input_ids", "loss_mask"),
    "rw": ("chosen_ids", "rejected_ids", "prompt_len"),
    "dpo": ("chosen_ids", "rejected_ids", "prompt_len"),
}


def check_rows(config: BaseExperimentConfig, rows: Rows, tokenizer: Any) -> None:
    """ValueError, with row and key, if the first rows do not fit the trainer."""
    checked = [rows[i] for i in range(min(len(rows), _NUM_CHECKED))]
    path = config.train_dataset.path
    for number, row in enumerate(checked):
        if not isinstance(row, dict):
            raise ValueError(f"data set {path!r}: row {number} must be a dict, got {row!r:.60}")
        for key in _row_keys(config):
            if key not in row:
                raise ValueError(
                    f"data set {path!r}: row {number} has no {key!r}, found {', '.join(row)}; "
                    f"{_advice(key)}"
                )
    if isinstance(config, PPOConfig) and "messages" in _row_keys(config):
        _check_prompts(config, [row["messages"] for row in checked], tokenizer)


def _row_keys(config: BaseExperimentConfig) -> tuple[str, ...]:
    """Required keys of a row; none for a user's own workflow."""
    if not isinstance(config, PPOConfig):
        return _ROW_KEYS[trainer_name(config)]
    takes_messages = (
        config.workflow in WORKFLOWS
        and config.workflow != "env"
        and config.rollout.agent.mode != "online"
        and "data_extract_prompt_fn" not in config.workflow_kwargs
    )
    return ("messages",) if takes_messages else ()


def _advice(key: str) -> str:
    if key != "messages":
        return "see docs/howto/dataset.md for what a row holds"
    return (
        "the workflow expects a chat there, a list of {'role', 'content'}; name the column of the "
        "question in train_dataset.prompt, or let the loader make it"
    )


def _check_prompts(config: PPOConfig, chats: list[Any], tokenizer: Any) -> None:
    """Prompts that leave no room for an answer fail; too many of them would end the run."""
    folder = model_folder(config.actor.path, weights=False)
    context = language_config(read_hf_config(folder)).get("max_position_embeddings")
    limit = min(config.gconfig.max_tokens, context or config.gconfig.max_tokens)
    lengths = [len(ids) for ids in chat_prompts_ids(chats, tokenizer)]
    too_long = sum(length >= limit for length in lengths)
    if not too_long:
        return
    found = (
        f"{too_long} of the first {len(lengths)} prompts have {limit} tokens or more (the longest "
        f"{max(lengths)}), which leaves no room for an answer in gconfig.max_tokens "
        f"({config.gconfig.max_tokens}) and the model's context ({context}); set "
        "train_dataset.max_length to leave such rows out"
    )
    if too_long > config.rollout.max_failure_ratio * len(lengths):
        raise ValueError(f"data set {config.train_dataset.path!r}: {found}")
    logger.warning("%s", found)


def run_trial(
    config: BaseExperimentConfig, rows: Rows, tokenizer: Any, say: Callable[[str], None]
) -> None:
    """Run one group of the first row; `say` gets a line for each successful check."""
    check_rows(config, rows, tokenizer)
    data = config.train_dataset
    say(f"rows      {len(rows):,} of {data.path}, split {data.split}")
    if not isinstance(config, PPOConfig) or config.rollout.agent.mode == "online":
        return
    engine = StubEngine(tokenizer, seed=config.seed)
    began = time.perf_counter()
    scratch = ScratchFolder("trial")
    # A trial leaves nothing in the run's folder, where images are kept.
    workflow = build_workflow(
        config, tokenizer, None, None, is_eval=False, image_folder=scratch.path
    )
    try:
        group = asyncio.run(_run_group(config, workflow, engine, rows[0]))
        name = type(workflow).__name__
        say(
            f"episodes  {config.gconfig.n_samples} of {name} in {time.perf_counter() - began:.1f} s"
        )
        for line in _describe_group(config, group, engine, tokenizer):
            say(line)
    finally:
        workflow.close()
        scratch.close()


async def _run_group(config: PPOConfig, workflow: Any, engine: StubEngine, row: Any) -> Any:
    errors: list[Exception] = []
    groups = trial_groups(config, engine, workflow, errors.append)
    try:
        async with asyncio.timeout(config.watchdog.seconds):
            return await groups.run(0, row)
    except Exception as error:  # an exception of user code is the result of the trial
        cause = errors[0] if errors else error
        raise ValueError(
            f"an episode of the first row failed: {describe(cause)} (a trial uses a stub model "
            f"with random tokens; it got {engine.num_requests} requests)"
        ) from cause


def _describe_group(
    config: PPOConfig, group: dict[str, torch.Tensor] | None, engine: StubEngine, tokenizer: Any
) -> Iterator[str]:
    if engine.first is None:
        yield "requests  none: the workflow sent none to the model"
    else:
        prompt = tokenizer.decode(engine.first.input_ids)
        yield f"prompt    {len(engine.first.input_ids)} tokens: {prompt!r:.300}"
    if group is None:
        yield "result    rejected: the workflow returned None"
        return
    rewards = ", ".join(f"{reward:g}" for reward in group["rewards"].tolist())
    yield f"rewards   {rewards:.200}"
    accept = build_filter(config, None)
    if accept is not None:
        yield f"filter    {'accepts' if accept(group) else 'rejects'} this group"


class StubEngine(InferenceEngine):
    """Replies immediately with random tokens."""

    def __init__(self, tokenizer: Any, *, seed: int) -> None:
        special = set(tokenizer.all_special_ids)
        self._tokens = [token for token in tokenizer.get_vocab().values() if token not in special]
        self._eos = tokenizer.eos_token_id
        self._random = random.Random(seed)
        self.num_requests = 0
        self.first: ModelRequest | None = None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.num_requests += 1
        self.first = self.first or req
        count = self._random.randint(1, min(req.gconfig.max_new_tokens, _MAX_STUB_TOKENS))
        drawn = self._random.choices(self._tokens, k=count - 1) + [self._eos]
        logprob = -math.log(len(self._tokens) + 1)
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=drawn,
            output_logprobs=[logprob] * count,
            output_versions=[0] * count,
            stop_reason="stop",
            tokenizer=req.tokenizer,
        )

    def initialize(self) -> None:
        """Nothing to connect to."""

    def destroy(self) -> None:
        """Nothing was started."""

    def pause_generation(self) -> None:
        """No request is ever in flight."""

    def continue_generation(self) -> None:
        """See `pause_generation`."""

    def update_weights(self, meta: Any, named_tensors: Any = None) -> None:
        raise NotImplementedError("a stub has no weights")

    def get_version(self) -> int:
        return 0

    def stats(self) -> dict[str, float]:
        return {"requests": self.num_requests}

    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        return {}
