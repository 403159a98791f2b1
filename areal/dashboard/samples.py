"""The samples that a run has kept: found by filters, and token by token.

Two places hold them: the table `samples` (some of every step, kept for ever) and `trajectories`
(groups that wait for training, or that a recovery may need). Both store safetensors.

    find_samples(run, SampleFilter(min_reward=1, text="boxed"))
    read_sample(run, task_id=12, sample=3)       # values per token: text, log-probability, ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.dashboard.reader import RunReader, UnreadableRunError

if TYPE_CHECKING:
    import sqlite3

_SHOWN_CHARS = 400  # of a text in a list
_MAX_WAITING = 64  # groups of `trajectories` that one search decodes
# Shown name -> stored name
_STRIPS = {
    "logprob": "logprobs",
    "version": "versions",
    "advantage": "advantages",
    "prox_logp": "prox_logp",
    "train_logp": "train_logp",
    "ref_logp": "ref_logp",
    "entropy": "entropy",
}
# Stored tensors by what has a value of them, and those that count or select.
_PER_TOKEN = {*_STRIPS.values(), "mask", "loss_mask", "ids", "input_ids", "attention_mask"}
_PER_SAMPLE = {"rewards", "original_rewards", "episode_ids", "seq_no_eos"}
_FINITE = {"ids", "input_ids", "mask", "loss_mask", "attention_mask", "episode_ids"}
_SKIPPED = (
    "training skipped this sample, whose advantages are 0; the pass of "
    "actor.use_decoupled_loss before training has every sample"
)
_MAX_SHOWN = 1 << 15  # tokens of one sample
_FIELDS = "task_id, sample, episode, step, reward, length, is_cut"


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """None: any. `state` is trained, or finished for those that wait for training."""

    state: str = "trained"
    task_id: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    text: str = ""  # in prompt or output, whatever the case
    limit: int = 50
    offset: int = 0


def find_samples(run: RunReader, wanted: SampleFilter) -> list[dict[str, Any]]:
    """Newest step first, the samples of a group together."""
    if wanted.state == "finished":
        return _find_waiting(run, wanted)
    if not run.has_table("samples"):
        return []
    given = {
        "task_id = ?": wanted.task_id,
        "step >= ?": wanted.min_step,
        "step <= ?": wanted.max_step,
        "reward >= ?": wanted.min_reward,
        "reward <= ?": wanted.max_reward,
        "length >= ?": wanted.min_length,
        "length <= ?": wanted.max_length,
    }
    where = {condition: value for condition, value in given.items() if value is not None}
    texts: tuple[str, ...] = ()
    conditions = list(where)
    if wanted.text:
        conditions.append("(has_text(prompt, ?) OR has_text(output, ?))")
        texts = (wanted.text.lower(),) * 2
    sql = f"""
        SELECT {_FIELDS}, substr(prompt, 1, {_SHOWN_CHARS}) AS prompt,
               substr(output, 1, {_SHOWN_CHARS}) AS output
        FROM samples {f"WHERE {' AND '.join(conditions)}" if conditions else ""}
        ORDER BY step DESC, task_id, sample LIMIT ? OFFSET ?"""
    rows = run.query(sql, (*where.values(), *texts, wanted.limit, wanted.offset))
    return [{**dict(row), "state": "trained"} for row in rows]


def count_samples(run: RunReader) -> int:
    return run.query("SELECT count(*) FROM samples")[0][0] if run.has_table("samples") else 0


def read_group(run: RunReader, task_id: int) -> list[dict[str, Any]]:
    """The stored samples of one prompt, with their texts; empty if none is stored."""
    kept = find_samples(run, SampleFilter(task_id=task_id, limit=1000))
    if kept or run.is_empty:
        return kept
    rows = run.query("SELECT task_id, data FROM trajectories WHERE task_id = ?", (task_id,))
    return [sample for row in rows for sample in _waiting_group(run, row)]


def read_sample(run: RunReader, task_id: int, sample: int) -> dict[str, Any] | None:
    """One sample with a list per value: `tokens` (texts), `ids`, `mask` (trained on), and where
    stored `logprob`, `version`, `advantage`, `prox_logp`, `train_logp`, `ref_logp`, `entropy`,
    `ratio`; `missing` says why a trained sample has no entropy or ratio, or that only its first
    tokens are here."""
    if run.has_table("samples"):
        rows = run.query(
            f"SELECT {_FIELDS}, data FROM samples WHERE task_id = ? AND sample = ?",
            (task_id, sample),
        )
        if rows:
            facts = {key: value for key, value in dict(rows[0]).items() if key != "data"}
            tensors = _decode(run, task_id, rows[0]["data"], "ids", num_axes=1)
            return {**facts, "state": "trained", **_strip(run, tensors, _not_computed(tensors))}
    if run.is_empty:
        return None
    rows = run.query("SELECT task_id, data FROM trajectories WHERE task_id = ?", (task_id,))
    if not rows:
        return None
    group = _decode(run, task_id, rows[0]["data"], "attention_mask", "input_ids", num_axes=2)
    if not 0 <= sample < len(group["input_ids"]):
        return None
    return {**_facts(task_id, sample, group), **_strip(run, _row(group, sample), [])}


def _find_waiting(run: RunReader, wanted: SampleFilter) -> list[dict[str, Any]]:
    """Decodes the newest groups only: their values are in no index."""
    if run.is_empty:
        return []
    rows = run.query(
        """SELECT task_id, data FROM trajectories CROSS JOIN tasks USING (task_id)
           WHERE state = 'finished' ORDER BY task_id DESC LIMIT ?""",
        (_MAX_WAITING,),
    )
    samples = [sample for row in rows for sample in _waiting_group(run, row)]
    kept = [sample for sample in samples if _matches(sample, wanted)]
    return kept[wanted.offset : wanted.offset + wanted.limit]


def _waiting_group(run: RunReader, row: sqlite3.Row) -> list[dict[str, Any]]:
    group = _decode(run, row["task_id"], row["data"], "attention_mask", "input_ids", num_axes=2)
    return [_texts(run, row["task_id"], group, i) for i in range(len(group["input_ids"]))]


def _texts(
    run: RunReader, task_id: int, group: Mapping[str, np.ndarray], sample: int
) -> dict[str, Any]:
    facts = _facts(task_id, sample, group)
    strip = _strip(run, _row(group, sample), [])
    begin = strip["mask"].index(True) if True in strip["mask"] else len(strip["mask"])
    prompt, output = "".join(strip["tokens"][:begin]), "".join(strip["tokens"][begin:])
    return {**facts, "prompt": prompt[:_SHOWN_CHARS], "output": output[:_SHOWN_CHARS]}


def _matches(sample: Mapping[str, Any], wanted: SampleFilter) -> bool:
    bounds = (
        ("reward", wanted.min_reward, wanted.max_reward),
        ("length", wanted.min_length, wanted.max_length),
    )
    for key, low, high in bounds:
        value = sample[key]
        if low is not None and (value is None or value < low):
            return False
        if high is not None and (value is None or value > high):
            return False
    if wanted.task_id is not None and sample["task_id"] != wanted.task_id:
        return False
    part = wanted.text.lower()
    return part in sample["prompt"].lower() or part in sample["output"].lower()


def _decode(
    run: RunReader, task_id: int, data: Any, *needed: str, num_axes: int
) -> dict[str, np.ndarray]:
    """With the tensors `needed`, which have `num_axes` axes; all that are read have their shape."""
    import safetensors
    import safetensors.numpy

    try:
        tensors = safetensors.numpy.load(data)
        shape = [tensors[key] for key in needed][0].shape
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(run, task_id, repr(error)) from error
    expected = dict.fromkeys(_PER_TOKEN, shape) | dict.fromkeys(_PER_SAMPLE, shape[:1])
    wrong = [
        f"{key} {tensors[key].dtype} {tensors[key].shape}"
        for key in sorted(expected.keys() & tensors.keys())
        if tensors[key].shape != expected[key]
        or (key in _FINITE and not np.isfinite(tensors[key]).all())
    ]
    if len(shape) != num_axes or wrong:
        found = ", ".join([f"{needed[0]} {shape}", *wrong])
        raise _unreadable(run, task_id, f"expected {num_axes} axes and equal shapes, got {found}")
    return tensors


def _unreadable(run: RunReader, task_id: int, why: str) -> UnreadableRunError:
    return UnreadableRunError(
        f"{run.paths.database}: the trajectory of prompt {task_id} cannot be read ({why})"
    )


def _row(group: Mapping[str, np.ndarray], sample: int) -> dict[str, np.ndarray]:
    """One sample of a group as the table `samples` has it, without padding."""
    length = int(group["attention_mask"][sample].sum())
    names = {
        "ids": "input_ids",
        "mask": "loss_mask",
        "versions": "versions",
        "logprobs": "logprobs",
    }
    return {name: group[key][sample, :length] for name, key in names.items() if key in group}


def _facts(task_id: int, sample: int, group: Mapping[str, np.ndarray]) -> dict[str, Any]:
    rewards = group.get("original_rewards", group.get("rewards"))
    episodes, cut = group.get("episode_ids"), group.get("seq_no_eos")
    return {
        "task_id": task_id,
        "sample": sample,
        "episode": sample if episodes is None else int(episodes[sample]),
        "step": None,
        "reward": None if rewards is None else float(rewards[sample]),
        "length": int(group["loss_mask"][sample].sum()) if "loss_mask" in group else 0,
        "is_cut": cut is not None and bool(cut[sample]),
        "state": "finished",
    }


def _not_computed(tensors: Mapping[str, np.ndarray]) -> list[str]:
    absent = [] if _policy_logp(tensors) is not None else ["ratio"]
    absent += [] if "entropy" in tensors else ["entropy"]
    what = f"{' and '.join(absent)} {'was' if len(absent) == 1 else 'were'} not computed"
    return [f"{what}: {_SKIPPED}"] if absent else []


def _policy_logp(tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Log-probabilities by the policy that trains."""
    return tensors.get("train_logp", tensors.get("prox_logp"))


def _strip(
    run: RunReader, tensors: Mapping[str, np.ndarray], missing: Sequence[str]
) -> dict[str, Any]:
    """A list per value, and what is `missing`."""
    length = len(tensors["ids"])
    if length > _MAX_SHOWN:  # else a page could not draw it
        tensors = {key: value[:_MAX_SHOWN] for key, value in tensors.items()}
        missing = [f"the first {_MAX_SHOWN} of {length} tokens are shown", *missing]
    ids = [int(token) for token in tensors["ids"]]
    mask = tensors.get("mask", np.zeros(len(ids)))
    strip: dict[str, Any] = {
        "ids": ids,
        "tokens": _pieces(run, ids),
        "mask": [bool(one) for one in mask],
        "missing": "; ".join(missing),
    }
    for name, key in _STRIPS.items():
        if key in tensors:
            strip[name] = [_number(value) for value in tensors[key].tolist()]
    policy_logp = _policy_logp(tensors)
    if policy_logp is not None and "logprobs" in tensors:
        ratios = np.exp(policy_logp.astype(np.float64) - tensors["logprobs"])
        strip["ratio"] = [_number(value) for value in ratios.tolist()]
    return strip


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(value, 5) if math.isfinite(value) else None


def _pieces(run: RunReader, ids: list[int]) -> list[str]:
    """The text of each token; its number where no stored sample had it."""
    texts: dict[int, str] = {}
    if run.has_table("pieces"):
        unique = sorted(set(ids))
        for begin in range(0, len(unique), 500):  # SQLite bounds the number of values
            part = unique[begin : begin + 500]
            marks = ", ".join("?" * len(part))
            sql = f"SELECT token_id, text FROM pieces WHERE token_id IN ({marks})"
            texts |= {row["token_id"]: row["text"] for row in run.query(sql, tuple(part))}
    return [texts.get(token, f"⟨{token}⟩") for token in ids]
