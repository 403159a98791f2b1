"""Suites: what `--suite` names, as keys of a training config.

A suite says which rows, which reward and how answers are sampled, and nothing about the model; so a
number depends on the suite and the model alone, whichever run the model comes from. Any key can be
overridden as in training (`valid_dataset.path=/data/gsm8k`). `--suite FILE` makes one of a table of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.dataset.source_files import first_row

FILE_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
_PROMPTS = ("messages", "prompt", "question", "problem")
_ANSWER = "answer"
# Of programs that answers contain: they run in processes of the reward's sandbox.
_CODE_LIMITS = {"max_processes": 8, "network": False}


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    rows: dict[str, Any]  # keys of valid_dataset
    reward_fn: str | None  # None: the user names one
    max_new_tokens: int = 2048
    reward_kwargs: dict[str, Any] | None = None
    votes: bool = True  # whether answers can be counted (maj@k)

    def keys(self) -> dict[str, Any]:
        """Config keys; those of the model come from elsewhere."""
        options = {} if self.reward_kwargs is None else {"reward_kwargs": self.reward_kwargs}
        reward = {} if self.reward_fn is None else {"reward_fn": self.reward_fn}
        return {
            "valid_dataset": dict(self.rows),
            "workflow_kwargs": options,
            "eval_workflow": "rlvr",
            "eval_gconfig": {"max_new_tokens": self.max_new_tokens, "greedy": True},
            **reward,
        }


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "arithmetic",
            {"path": "arithmetic", "split": "test", "dataset_kwargs": {"num_rows": 500}},
            "gsm8k",
            max_new_tokens=32,
        ),
        Suite(
            "code",
            {"path": "humaneval", "split": "test"},
            "unit_tests",
            reward_kwargs={"limits": _CODE_LIMITS, "timeout_seconds": 60},
            votes=False,
        ),
        Suite(
            "countdown",
            {"path": "countdown", "split": "test", "dataset_kwargs": {"num_rows": 500}},
            "countdown",
            votes=False,
        ),
        Suite("gsm8k", {"path": "gsm8k", "split": "test"}, "gsm8k"),
        Suite("math", {"path": "math500", "split": "test"}, "math_verify", max_new_tokens=4096),
    )
}


def find_suite(name: str) -> Suite:
    """Of SUITES, or of a file with rows."""
    if name in SUITES:
        return SUITES[name]
    file = Path(name).expanduser()
    if file.suffix.lower() not in FILE_SUFFIXES:
        raise ValueError(
            f"--suite: unknown suite {name!r}; expected one of {', '.join(SUITES)}, or a file "
            f"({', '.join(FILE_SUFFIXES)})"
        )
    if not file.is_file():
        raise FileNotFoundError(f"--suite: {name} does not exist")
    return Suite(file.stem, {"path": str(file.absolute()), **_columns(file)}, None)


def _columns(file: Path) -> dict[str, str]:
    """The columns of question and answer, by their usual names."""
    row = first_row(file, "test")
    if row is None:  # Parquet, or an empty file, which the loader reports
        return {"prompt": "question", "answer": _ANSWER}
    prompt = next((name for name in _PROMPTS if name in row), None)
    if prompt is None:
        raise ValueError(
            f"--suite: {file} has none of the columns {', '.join(_PROMPTS)}, found "
            f"{', '.join(row)}; rename the column of the question, or give a config with "
            "valid_dataset.prompt (--config)"
        )
    return {"prompt": prompt, "answer": _ANSWER} if _ANSWER in row else {"prompt": prompt}
