"""Do the servers generate with the weights that the trainer has?

    replies = sample_replies(runner, inference, prompts, temperature=1.0, timeout_s=60)
    compare_logprobs(actor_engine, as_batch(replies), tolerance)      # of both sides
    differing_weights(actor_engine, inference.weight_checksums())     # tensors, by server

`UpdateProbe` does both after some weight updates of a run, and reports what it found in the log and
in `run.db`, where `areal doctor RUN` reads it: no weights of old versions need to be kept. It sends
a few short requests with seeds of their own and computes one small forward: it draws from no
generator of the run, and writes nothing to the ledger. `areal doctor CONFIG` does the same on
demand, and looks for the cause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal.api.config.inference import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine, TrainEngine
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.remote.server_control import ServerRefusedError
from areal.run.database import Look
from areal.utils import logging
from areal.utils.data import MULTI_MODAL_KEY, concat_padded_tensors
from areal.utils.device import best_device
from areal.weight_sync.bucket import Checksums

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.rollout.event_loop import TaskRunner
    from areal.run.database import RunDatabase

logger = logging.getLogger("Probe")

NUM_PROMPTS = 4
MAX_NEW_TOKENS = 8
MAX_PROMPT = 1024  # tokens; longer prompts would take longer than they say
# Mean |log p of the engine - log p of the trainer| over the probe's tokens that two correct
# programs stay below. float32 differs by the order of sums alone.
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.1, "float16": 0.1, "fp8": 0.3}


@dataclass(frozen=True, slots=True)
class Agreement:
    """Log-probabilities of the same tokens by engine and trainer."""

    num_tokens: int
    mean_gap: float
    max_gap: float
    tolerance: float  # of the mean

    @property
    def holds(self) -> bool:
        return self.mean_gap <= self.tolerance  # not if it is NaN

    def __str__(self) -> str:
        return (
            f"log-probabilities of {self.num_tokens} tokens differ by {self.mean_gap:.2g} on "
            f"average (at most {self.tolerance:g} is expected), by {self.max_gap:.2g} at worst"
        )


def tolerance_of(config: PPOConfig) -> float:
    """By the coarser dtype of the two sides."""
    default = "bfloat16" if best_device() == "cuda" else "float32"
    actor = config.actor.dtype or default
    return max(TOLERANCES.get(dtype, 0.1) for dtype in (actor, config.server.dtype or actor))


def sample_replies(
    runner: TaskRunner,
    inference: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    timeout_s: float,
) -> list[ModelResponse]:
    """A short reply to each prompt, drawn from the whole distribution; the same on every call while
    the weights are the same."""

    async def ask() -> list[ModelResponse]:
        options = GenerationHyperparameters(
            max_new_tokens=MAX_NEW_TOKENS, temperature=temperature, ignore_eos=True
        )
        requests = [
            ModelRequest(input_ids=list(ids), gconfig=options.with_seed(seed))
            for seed, ids in enumerate(prompts)
        ]
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*map(inference.agenerate, requests))

    return runner.run(ask()).result(timeout_s + 1)


def as_batch(replies: Sequence[ModelResponse]) -> dict[str, torch.Tensor]:
    """Padded rows of prompt and reply: tokens, and `logprobs` and `loss_mask` of the replies."""
    rows = []
    for reply in replies:
        ids = [*reply.input_tokens, *reply.output_tokens]
        start = len(reply.input_tokens)
        logprobs, mask = torch.zeros(1, len(ids)), torch.zeros(1, len(ids), dtype=torch.bool)
        logprobs[0, start:] = torch.tensor(reply.output_logprobs)
        mask[0, start:] = True
        rows.append(
            {
                "input_ids": torch.tensor([ids], dtype=torch.int32),
                "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
                "logprobs": logprobs,
                "loss_mask": mask,
            }
        )
    return concat_padded_tensors(rows)


def compare_logprobs(
    engine: TrainEngine, batch: Mapping[str, torch.Tensor], tolerance: float
) -> Agreement:
    """`logprobs` at the tokens of `loss_mask`, against those of the trainer's present weights."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    own_BS = engine.forward_batch(inputs)[:, :-1].cpu()  # at t, of the token at t + 1
    mask_BS = batch["loss_mask"][:, 1:].bool()
    gaps = (own_BS - batch["logprobs"][:, 1:].float())[mask_BS].abs()
    if not len(gaps):
        return Agreement(0, 0.0, 0.0, tolerance)
    return Agreement(len(gaps), gaps.mean().item(), gaps.max().item(), tolerance)


def differing_weights(engine: TrainEngine, shown: Mapping[str, Checksums]) -> dict[str, list[str]]:
    """By server, the tensors that are not what the trainer sends; `shown` are the servers' own."""
    dtypes = {name: dtype for one in shown.values() for name, (dtype, _) in one.items()}
    own = engine.weight_checksums(dtypes)
    return {
        server: [name for name, checksum in own.items() if theirs.get(name) != checksum]
        for server, theirs in shown.items()
    }


# What an engine raises that does not show its weights or layers.
NOT_SHOWN = (NotImplementedError, ValueError, ServerRefusedError)


class UpdateProbe:
    """Compares engine and trainer after some weight updates of a process."""

    def __init__(
        self,
        config: PPOConfig,
        runner: TaskRunner,
        engine: TrainEngine,
        inference: InferenceEngine,
        database: RunDatabase,
    ) -> None:
        self._config = config
        self._runner = runner
        self._engine = engine
        self._inference = inference
        self._database = database
        self._num_updates = 0

    def look(self, trajectories: Sequence[Mapping[str, Any]], version: int) -> None:
        """Weights of `version` were just published; the prompts are those of `trajectories`."""
        if self._config.rollout.scheduling_strategy.target is not None:
            return  # a server that shares the trainer's device is not on it between two batches
        self._num_updates += 1
        if not is_looked_at(self._num_updates):
            return
        start = time.monotonic()
        try:
            looks = self._compare(probe_prompts(trajectories), version)
        except Exception as error:  # boundary: a run does not end because nobody could look
            why = f"could not look: {type(error).__name__}: {error}"
            looks = [Look(version, "weights", "unseen", why)]
        self._report(looks, time.monotonic() - start)

    def _report(self, looks: Sequence[Look], took_s: float) -> None:
        fault = next((one for one in looks if one.state == "fault"), None)
        text = f"FAULT: {fault.found}" if fault else "; ".join(one.found for one in looks)
        if not fault and any(one.state == "ok" for one in looks):
            text = f"engine and trainer agree: {text}"
        text = f"after the update to version {looks[0].version}: {text}"
        text = f"{text}; looking took {took_s:.2g} s"
        self._database.record_looks(looks)
        self._database.record_event("doctor", text)
        if fault:
            logger.warning("%s. Find the cause with: areal doctor CONFIG", text)
        else:
            logger.info("%s", text)

    def _compare(self, prompts: list[list[int]], version: int) -> list[Look]:
        """Of the weights and, if these have no fault, of the logits."""
        weights = self._compare_weights(version)
        if weights.state == "fault" or not prompts:
            return [weights]
        config = self._config
        replies = sample_replies(
            self._runner,
            self._inference,
            prompts,
            temperature=config.actor.temperature,
            timeout_s=config.rollout.request_timeout,
        )
        agreement = compare_logprobs(self._engine, as_batch(replies), tolerance_of(config))
        state = "ok" if agreement.holds else "fault"
        return [weights, Look(version, "logits", state, str(agreement))]

    def _compare_weights(self, version: int) -> Look:
        served = self._inference.get_version()
        if served != version:
            text = f"the servers still serve version {served}"
            return Look(version, "weights", "fault", text)
        try:
            shown = self._inference.weight_checksums()
            differing = differing_weights(self._engine, shown)
        except NOT_SHOWN as error:
            return Look(version, "weights", "unseen", f"by tensor: {error}")
        for server, names in differing.items():
            if names:
                text = (
                    f"{names[0]} of server {server} is not the trainer's tensor "
                    f"({len(names)} differ)"
                )
                return Look(version, "weights", "fault", text)
        text = f"all tensors of {len(differing)} server(s) are the trainer's"
        return Look(version, "weights", "ok", text)


def is_looked_at(num_updates: int) -> bool:
    """The 1st, 2nd, 4th, 8th, ... update of a process up to the 64th, and every 64th: soon after
    the start, where most faults are, and rarely enough to cost nothing."""
    is_power = num_updates & (num_updates - 1) == 0
    return is_power or num_updates % 64 == 0


def probe_prompts(trajectories: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Prompts of the first groups: the tokens before the first generated one. None with images, or
    too long."""
    prompts = []
    for trajectory in trajectories[:NUM_PROMPTS]:
        mask = trajectory["loss_mask"][0].bool()
        if MULTI_MODAL_KEY in trajectory or not mask.any():
            continue
        length = int(mask.int().argmax())
        if 0 < length <= MAX_PROMPT:
            prompts.append(trajectory["input_ids"][0, :length].tolist())
    return prompts
