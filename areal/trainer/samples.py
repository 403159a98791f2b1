"""Keeps a few samples of each step in run.db, to be looked at after their trajectories are pruned.

In: the batch of a step and the tensors that training computed for it. Out: rows of the table
`samples` with a value per token, and the text of every token in `pieces`, so that readers need no
tokenizer.

    ids mask versions logprobs                 as the workflow returned them
    advantages ref_logp                        as training computed them, where it did
    entropy, and prox_logp or train_logp       of the policy that trains: from a pass before
                                               training, else from the training pass, which gives
                                               none (NaN) of a sample it skipped

Bounded: at most `_MAX_STEPS` steps of a run, of each the first group of its batch, of that at most
`_MAX_TOKENS` tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areal.api.io_struct import EPISODE_KEY
from areal.api.json_text import well_formed
from areal.run.database import StoredSample

if TYPE_CHECKING:
    from areal.rollout.executor import Batch
    from areal.run.database import RunDatabase

_MAX_STEPS = 1000
_MAX_TOKENS = 1 << 14  # of one step
_COMPUTED = ("advantages", "prox_logp", "train_logp", "ref_logp", "entropy")
_SEEN = ("train_logp", "entropy")  # by the training pass, in the rows that it computed
# Safetensors' names and sizes; other values are F32.
_DTYPES = {"ids": ("I32", 4), "versions": ("I32", 4), "mask": ("BOOL", 1)}


class SampleRecorder:
    """Records samples of every n-th step, so that a long run keeps its first and its last alike."""

    def __init__(self, database: RunDatabase, tokenizer: Any, *, total_steps: int) -> None:
        self._database = database
        self._tokenizer = tokenizer
        self._every = -(-total_steps // _MAX_STEPS)
        self._known: set[int] = set()  # tokens whose text is stored

    def record(self, batch: Batch, data: Mapping[str, Any], step: int) -> None:
        """`data` holds all samples of `batch`, in its order."""
        if step % self._every:
            return
        task_id, group = batch.task_ids[0], batch.trajectories[0]
        samples: list[StoredSample] = []
        used: set[int] = set()
        room = _MAX_TOKENS
        values = _per_token(group, data)
        texts: dict[tuple[int, ...], str] = {}  # the samples share their prompt, often all
        for row, length in enumerate(group["attention_mask"].sum(dim=1).int().tolist()):
            tensors = {key: value[row, :length] for key, value in values.items()}
            for key in _SEEN:
                if key in tensors and np.isnan(tensors[key]).any():
                    del tensors[key]
            room -= length
            if room < 0 and samples:
                break
            samples.append(self._stored(task_id, row, step, group, tensors, data, texts))
            used.update(tensors["ids"].tolist())
        new = used - self._known
        self._known |= new
        pieces = {token: self._text([token]) for token in new}
        self._database.record_samples(samples, pieces)

    def _stored(
        self,
        task_id: int,
        row: int,
        step: int,
        group: Mapping[str, Any],
        tensors: dict[str, np.ndarray],
        data: Mapping[str, Any],
        texts: dict[tuple[int, ...], str],
    ) -> StoredSample:
        ids, trained = tuple(tensors["ids"].tolist()), tensors["mask"].tolist()
        begin = trained.index(True) if True in trained else len(ids)
        prompt, output = ids[:begin], ids[begin:]
        for part in {prompt, output} - texts.keys():
            texts[part] = self._text(list(part))
        rewards = data.get("original_rewards", data["rewards"])
        return StoredSample(
            task_id=task_id,
            sample=row,
            episode=int(group[EPISODE_KEY][row]) if EPISODE_KEY in group else row,
            step=step,
            reward=float(rewards[row]),
            length=sum(trained),
            is_cut=bool(data["seq_no_eos"][row]) if "seq_no_eos" in data else False,
            prompt=texts[prompt],
            output=texts[output],
            data=_encoded(tensors),
        )

    def _text(self, ids: list[int]) -> str:
        return well_formed(self._tokenizer.decode(ids))


def _encoded(tensors: Mapping[str, np.ndarray]) -> bytes:
    """In the format of safetensors, whose own `save` takes as long as all the rest of a step."""
    keys = tuple(sorted(tensors, key=lambda key: key == "mask"))  # last, so that all are aligned
    head = _header(keys, len(tensors["ids"]))
    return head + b"".join([tensors[key].tobytes() for key in keys])


@lru_cache(maxsize=4096)
def _header(keys: tuple[str, ...], length: int) -> bytes:
    header, offset = {}, 0
    for key in keys:
        dtype, size = _DTYPES.get(key, ("F32", 4))
        end = offset + size * length
        header[key] = {"dtype": dtype, "shape": [length], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _per_token(group: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Values `[G, S]` of the group, which has the first rows of `data`; converted at once, because
    a row at a time costs as much as all, and to numpy, which cuts rows in no time."""
    num_rows = len(group["input_ids"])
    tensors = {
        "ids": group["input_ids"].int(),
        "mask": group["loss_mask"].bool(),
        "versions": group["versions"].int(),
        "logprobs": group["logprobs"].float(),
    }
    width = tensors["ids"].shape[1]
    # Where training alone asked the policy, prox_logp is at most a copy of the sampled ones.
    copies = {"prox_logp"} if "train_logp" in data else set()
    for key in _COMPUTED:
        if key in data and key not in copies:
            # Position t of the batch is about token t + 1 (ppo/batch.py); nothing is about the 0th.
            values = data[key][:num_rows, : width - 1].detach().cpu().float()
            tensors[key] = torch.nn.functional.pad(values, (1, 0))
    return {key: value.numpy(force=True) for key, value in tensors.items()}
