"""The tokens of an episode in order, and the trajectory made of them.

Token in, token out: sampled tokens are kept as they are and later text is appended, so every
log-probability belongs to its token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from areal.api.io_struct import ModelResponse, Sample
from areal.api.routed_experts import ROUTED_KEY, experts_of_tokens


class Transcript:
    """Alternating input text and replies of the model; `ids` are all tokens so far.

    transcript = Transcript(prompt_ids)
    transcript.add_reply(await generate(transcript.ids))
    transcript.add_text(feedback_ids)
    transcript.add_reply(await generate(transcript.ids))
    trajectory = transcript.trajectory(reward=1.0)
    """

    def __init__(self, prompt_ids: list[int]) -> None:
        self.ids: list[int] = list(prompt_ids)
        self._replies: list[tuple[int, ModelResponse]] = []  # (index of the first token, reply)

    @property
    def num_turns(self) -> int:
        return len(self._replies)

    def add_text(self, ids: list[int]) -> None:
        """Append text that the model did not generate; it is not trained on."""
        self.ids += ids

    def add_reply(self, response: ModelResponse) -> None:
        """Append a reply to exactly the tokens so far."""
        assert len(response.input_tokens) == len(self.ids), "a reply to other tokens"
        self._replies.append((len(self.ids), response))
        # Not in place: the request may hold a reference to the list.
        self.ids = self.ids + response.output_tokens

    def trajectory(self, reward: float) -> dict[str, torch.Tensor]:
        """A batch of one (see `api/io_struct.py`). `seq_no_eos` is that of the last reply."""
        shape = 1, len(self.ids)
        logprobs = np.zeros(shape, np.float32)
        versions, turn_ids = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        for turn, (start, reply) in enumerate(self._replies):
            said = slice(start, start + reply.output_len)
            logprobs[0, said] = reply.output_logprobs
            versions[0, said] = reply.output_versions
            turn_ids[0, said] = turn
        cut = bool(self._replies) and self._replies[-1][1].stop_reason == "length"
        row = {
            "input_ids": np.array([self.ids], np.int32),
            "attention_mask": np.ones(shape, bool),
            "loss_mask": (turn_ids >= 0).astype(np.int32),
            "logprobs": logprobs,
            "versions": versions,
            "turn_ids": turn_ids,
            "rewards": np.array([reward], np.float32),
            "seq_no_eos": np.array([cut]),
        }
        routed = experts_of_tokens([reply for _, reply in self._replies], len(self.ids))
        if routed is not None:
            row[ROUTED_KEY] = routed[None]
        # Through numpy: torch is several times slower for lists and small tensors.
        return {key: torch.from_numpy(value) for key, value in row.items()}


def group_trajectory(
    prompt_ids: list[int], samples: Sequence[Sample], rewards: Sequence[float]
) -> dict[str, torch.Tensor]:
    """One row per sample of a prompt: what `Transcript.trajectory` says of each, padded."""
    start = len(prompt_ids)
    ends = [start + len(sample.tokens) for sample in samples]
    shape = len(samples), max(ends)
    input_ids, versions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    logprobs, turn_ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    input_ids[:, :start] = prompt_ids
    versions[:, :start] = turn_ids[:, :start] = -1
    for row, (sample, end) in enumerate(zip(samples, ends, strict=True)):
        input_ids[row, start:end] = sample.tokens
        logprobs[row, start:end] = sample.logprobs
        versions[row, start:end] = sample.versions
    real = np.arange(shape[1]) < np.array(ends)[:, None]
    loss_mask = real.astype(np.int32)
    loss_mask[:, :start] = 0
    rows = {
        "input_ids": input_ids,
        "attention_mask": real,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "versions": versions,
        "turn_ids": turn_ids,
        "rewards": np.array(rewards, np.float32),
        "seq_no_eos": np.array([sample.stop_reason == "length" for sample in samples]),
    }
    recorded = [sample.routed_experts for sample in samples]
    if recorded[0] is not None:
        rows[ROUTED_KEY] = _padded_experts(recorded, shape)
    return {key: torch.from_numpy(value) for key, value in rows.items()}


def _padded_experts(recorded: Sequence[np.ndarray | None], shape: tuple[int, int]) -> np.ndarray:
    """[B, S, L, K], without a record on the last token of a row and after it."""
    first = recorded[0]
    assert first is not None, "the samples of a group are alike"
    routed = np.full((*shape, *first.shape[1:]), np.iinfo(first.dtype).max, first.dtype)
    for row, its in enumerate(recorded):
        assert its is not None, "the samples of a group are alike"
        routed[row, : len(its)] = its
    return routed
