"""Countdown: make a target from given numbers, each used once, with + - * / and brackets.

`path` is the bare name `countdown` (problems made on the spot, all of them solvable), the hub's
Jiayi-Pan/Countdown-Tasks-3to4, a folder with `{split}.jsonl` files or one file. Columns: nums,
target. Of the hub's single split one problem in ten is held out by its hash (`held_out`).

`dataset_kwargs.style` is how a problem is put: `words` for models that read English, or `short`
(`24 from 3,5,9:`) for models that are trained from nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.dataset.chat_rows import (
    drop_long_prompts,
    is_held_out,
    known_options,
    sft_rows,
    user_says,
    wants_held_out,
)
from areal.dataset.source_files import read_rows

HUB_NAME = "Jiayi-Pan/Countdown-Tasks-3to4"
STYLES = {
    "short": "{target} from {nums}:",
    "words": "Make {target} out of the numbers {nums}. Use each of them exactly once, with + - * / "
    "and brackets. Write the expression at the end as <answer>...</answer>.",
}
NUM_ROWS = 10_000  # problems made when the config names no number
MAX_FRUITLESS_DRAWS = 2000  # so many draws without a new problem mean that there is none


@dataclass(frozen=True, slots=True)
class Countdown:
    """`solution` is empty when it is not known."""

    nums: tuple[int, ...]
    target: int
    solution: str = ""

    @property
    def key(self) -> str:
        """The same for any order of the numbers."""
        return f"{self.target}:{sorted(self.nums)}"

    def text(self, style: str) -> str:
        nums = ("," if style == "short" else ", ").join(map(str, self.nums))
        return STYLES[style].format(target=self.target, nums=nums)


def load_rl(
    path: str,
    *,
    split: str,
    tokenizer: Any,
    max_length: int | None = None,
    style: str = "words",
    num_rows: int | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """{"messages", "answer", "nums"}: the countdown reward reads the last two.

    `options` are those of `make_problems`, for problems made on the spot.
    """
    _check_style(style)
    known_options(options, make_problems, besides=("style", "num_rows"))
    _check_num_rows(num_rows)
    if path == "countdown":
        num_rows = NUM_ROWS if num_rows is None else num_rows
        problems = make_problems(split=split, num_rows=num_rows, **options)
    else:
        _refuse(options, path)
        problems = _read_problems(path, split)[:num_rows]
    rows = [
        {"messages": user_says(p.text(style)), "answer": str(p.target), "nums": list(p.nums)}
        for p in problems
    ]
    return drop_long_prompts(rows, tokenizer, max_length)


def load_sft(
    path: str,
    *,
    split: str,
    tokenizer: Any,
    max_length: int | None = None,
    style: str = "words",
    num_rows: int = NUM_ROWS,
    **options: Any,
) -> list[dict[str, Any]]:
    """{"input_ids", "loss_mask"}: one solution each, so only for problems made on the spot."""
    _check_style(style)
    known_options(options, make_problems, besides=("style", "num_rows"))
    _check_num_rows(num_rows)
    if path != "countdown":
        raise ValueError(
            f"dataset.path: {path!r} holds no solutions to learn; write countdown, whose problems "
            "are made with one, or set dataset.type to rl"
        )
    problems = make_problems(split=split, num_rows=num_rows, **options)
    wrap = "{}" if style == "short" else "<answer>{}</answer>"
    chats = [(user_says(p.text(style)), wrap.format(p.solution)) for p in problems]
    return sft_rows(chats, tokenizer, max_length)


def make_problems(
    *,
    split: str,
    num_rows: int,
    num_operands: int | Sequence[int] = (3, 4),
    max_number: int = 99,
    max_target: int = 100,
    seed: int = 0,
) -> list[Countdown]:
    """`num_rows` distinct problems of `split`, a function of the options alone.

    `num_operands` is how many numbers a problem has, or [least, most] of them.
    """
    bounds = num_operands if isinstance(num_operands, Sequence) else [num_operands] * 2
    if len(bounds) != 2 or not 2 <= bounds[0] <= bounds[1] <= 8:
        raise ValueError(
            "dataset_kwargs.num_operands must be a number from 2 to 8 or [least, most], "
            f"got {num_operands}"
        )
    for name, value in (("max_number", max_number), ("max_target", max_target)):
        if value < 1:
            raise ValueError(f"dataset_kwargs.{name} must be at least 1, got {value}")
    held_out, rng = wants_held_out(split), random.Random(seed)
    problems: dict[str, Countdown] = {}
    fruitless = 0
    while len(problems) < num_rows and fruitless < MAX_FRUITLESS_DRAWS:
        problem = _draw(rng, rng.randint(*bounds), max_number)
        fruitless += 1
        good = 1 <= problem.target <= max_target and is_held_out(problem.key) == held_out
        if good and problem.key not in problems:
            problems[problem.key], fruitless = problem, 0
    if len(problems) < num_rows:
        raise ValueError(
            f"dataset_kwargs.num_rows: found only {len(problems)} problems for split {split!r}, "
            f"wanted {num_rows}; ask for fewer, or raise max_number or max_target"
        )
    return list(problems.values())


def _draw(rng: random.Random, count: int, max_number: int) -> Countdown:
    """Random numbers, joined two at a time until one is left: that is the target."""
    nums = [rng.randint(1, max_number) for _ in range(count)]
    parts = [(value, str(value)) for value in nums]
    while len(parts) > 1:
        rng.shuffle(parts)
        (a, left), (b, right), *rest = parts
        operators = "+-*/" if b and a % b == 0 else "+-*"
        operator = rng.choice(operators)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]
        text = f"{left}{operator}{right}" if not rest else f"({left}{operator}{right})"
        parts = [(value, text), *rest]
    (target, solution) = parts[0]
    return Countdown(tuple(nums), target, solution)


def _read_problems(path: str, split: str) -> list[Countdown]:
    columns = ("nums", "target")
    if path != HUB_NAME:
        rows = read_rows(path, split=split, columns=columns)
        return [Countdown(tuple(row["nums"]), row["target"]) for row in rows]
    held_out = wants_held_out(split)
    rows = read_rows(path, split="train", columns=columns)
    problems = [Countdown(tuple(row["nums"]), row["target"]) for row in rows]
    return [problem for problem in problems if is_held_out(problem.key) == held_out]


def _refuse(options: dict[str, Any], path: str) -> None:
    for name in options:
        raise ValueError(
            f"dataset_kwargs.{name}: the problems of {path!r} are given; only path countdown, "
            "whose problems are made on the spot, has options"
        )


def _check_style(style: str) -> None:
    if style not in STYLES:
        raise ValueError(f"dataset_kwargs.style must be {' or '.join(STYLES)}, got {style!r}")


def _check_num_rows(num_rows: int | None) -> None:
    if num_rows is not None and (type(num_rows) is not int or num_rows < 1):
        raise ValueError(f"dataset_kwargs.num_rows must be at least 1, got {num_rows!r}")
