"""The PPO batch: a padded dict `[B, S]` of all samples of a step.

    data = collect(trajectories)          # one trajectory = the samples of one prompt
    for minibatch in minibatches(data, keys, 4): ...

Position t of every token tensor refers to the token at t + 1, as in an engine's log-probabilities
and values: loss_mask, logprobs, versions and turn_ids are shifted together. Any number of groups
and samples makes a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from areal.algorithm.advantage import shift_left
from areal.algorithm.normalization import number_episodes
from areal.api.io_struct import EPISODE_KEY
from areal.api.routed_experts import ROUTED_KEY
from areal.utils.data import (
    MULTI_MODAL_KEY,
    concat_batch,
    select_rows,
    sequence_lengths,
)
from areal.utils.row_values import RowValues
from areal.utils.seqpack import pack_sequences


def collect(trajectories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All samples as one batch; `group_ids` `[B]` are equal for the same prompt, `episode_ids`
    `[B]` for the same episode. Rows without episode id are an episode each. If an episode has
    several rows, `credit` `[B, S]` is 1 / (rows of its episode)."""
    batch, meta = concat_batch([_with_episodes(trajectory) for trajectory in trajectories])
    sizes = torch.tensor(meta.traj_group_sizes)
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    episode_ids = number_episodes(group_ids, batch[EPISODE_KEY])  # unique in the batch
    data = {**batch, **_aligned(batch), "group_ids": group_ids, EPISODE_KEY: episode_ids}
    rows_of_B = torch.bincount(episode_ids)[episode_ids]
    if bool((rows_of_B > 1).any()):
        data["credit"] = (1 / rows_of_B)[:, None].expand_as(batch["attention_mask"]).contiguous()
    return data


def _with_episodes(trajectory: Mapping[str, Any]) -> Mapping[str, Any]:
    if EPISODE_KEY in trajectory:
        return trajectory
    return {**trajectory, EPISODE_KEY: torch.arange(len(trajectory["attention_mask"]))}


def group_sizes(data: Mapping[str, Any]) -> list[int]:
    return torch.bincount(data["group_ids"]).tolist()


class TokenScorer(Protocol):
    """A model that is asked for per-token outputs: a TrainEngine, or servers."""

    def forward_batch(self, input_: dict[str, Any]) -> torch.Tensor: ...


def required(data: Mapping[str, Any], key: str, option: str) -> torch.Tensor:
    """`data[key]`, which a workflow must provide only if `option` of the config is used."""
    if key not in data:
        raise ValueError(
            f"{option} needs the key {key!r} in every trajectory (found {sorted(data)}): return it "
            "from the workflow"
        )
    return data[key]


def token_outputs(
    engine: TokenScorer,
    data: Mapping[str, Any],
    *,
    replay: bool = False,
    with_entropy: bool = False,
) -> torch.Tensor:
    """Per-token outputs: log-probabilities or a critic's values `[B, S]`; `with_entropy`
    log-probabilities and entropies `[B, S, 2]`.

    With `replay` by the experts on record, if `data` has some; a model but the one that generated
    the tokens has experts of its own.
    """
    keys = ("input_ids", "attention_mask", MULTI_MODAL_KEY, *([ROUTED_KEY] if replay else []))
    given = {key: data[key] for key in keys if key in data}
    more = {"with_entropy": True} if with_entropy else {}  # servers know no entropies
    return engine.forward_batch(given, **more)


def loss_weight(mb: Mapping[str, Any]) -> torch.Tensor:
    """The weight of a micro-batch in the mean of its batch: the credit of its loss tokens."""
    mask = mb["loss_mask"].bool()
    return mb["credit"].masked_fill(~mask, 0.0).double().sum() if "credit" in mb else mask.sum()


def minibatches(
    data: Mapping[str, Any], keys: Sequence[str], count: int
) -> Iterator[dict[str, Any]]:
    """At most `count` parts of nearly equal length, with those `keys` that `data` has.

    The assignment depends on the lengths only.
    """
    part = {key: data[key] for key in ("input_ids", "attention_mask", *keys) if key in data}
    lengths = sequence_lengths(part["attention_mask"]).tolist()
    for rows in pack_sequences(lengths, min_bins=count):
        yield select_rows(part, rows)


def seen_values(
    data: Mapping[str, Any], found: RowValues, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """`[B, S]` by name of the rows in `found`, NaN in those that no loss saw."""
    shape = data["attention_mask"].shape
    values = {name: torch.full(shape, torch.nan) for name in names}
    for row, seen in found.items():
        for name, value_BS in values.items():
            value_BS[row] = 0.0  # on padding
            value_BS[row, : len(seen[name])] = seen[name]
    return values


def _aligned(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Token tensors shifted to the position that predicts the token."""
    shifted = {
        "loss_mask": shift_left(batch["loss_mask"]).bool(),
        "logprobs": shift_left(batch["logprobs"].float()),
        "versions": shift_left(batch["versions"], fill=-1),
    }
    if "turn_ids" in batch:
        shifted["turn_ids"] = shift_left(batch["turn_ids"], fill=-1)
    return shifted
