"""Generated arithmetic problems: `47+36=` with answer `83`. No download.

A hash of the problem assigns it to the test split (`held_out`); `36+47` and `47+36` count as one.
Pairs for reward models and DPO prefer the right answer to a near miss.

`dataset_kwargs` set the difficulty: operators, the digits of each operand, and the format of the
supervised target: `plain` (`83`), or `reversed` (`38>83`: digits in carry order, then the answer,
so that the last number is the answer in both).
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.dataset.chat_rows import (
    ONE_IN,
    Rows,
    drop_long_prompts,
    is_held_out,
    known_options,
    pair_rows,
    sft_rows,
    user_says,
    wants_held_out,
)

Digits = int | Sequence[int]
MISSES = (1, -1, 2, -2, 10, -10)  # error of a rejected answer
MAX_ALL_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class Problem:
    first: int
    operator: str
    second: int

    @property
    def text(self) -> str:
        return f"{self.first}{self.operator}{self.second}="

    @property
    def answer(self) -> str:
        match self.operator:
            case "+":
                return str(self.first + self.second)
            case "-":
                return str(self.first - self.second)
            case _:
                return str(self.first * self.second)

    @property
    def near_miss(self) -> str:
        """A wrong answer, deterministic per problem."""
        return str(int(self.answer) + MISSES[(self.first + 7 * self.second) % len(MISSES)])

    @property
    def held_out(self) -> bool:
        operands = [self.first, self.second]
        if self.operator in "+*":
            operands.sort()
        return is_held_out(f"{operands[0]}{self.operator}{operands[1]}")


def get_arithmetic_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, **options: Any
) -> Rows:
    """{"messages", "answer"}. `options` are those of `make_problems`."""
    problems, _ = _problems(split, options)  # the target format matters to supervised rows only
    rows = [{"messages": user_says(p.text), "answer": p.answer} for p in problems]
    return drop_long_prompts(rows, tokenizer, max_length)


def get_arithmetic_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, **options: Any
) -> Rows:
    """{"input_ids", "loss_mask"}. `options` are those of `make_problems`, and style (`target`)."""
    problems, style = _problems(split, options)
    chats = [(user_says(p.text), target(p.answer, style)) for p in problems]
    return sft_rows(chats, tokenizer, max_length)


def get_arithmetic_rw_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, **options: Any
) -> Rows:
    """{"chosen_ids", "rejected_ids", "prompt_len"}. `options` as those of the SFT rows."""
    problems, style = _problems(split, options)
    pairs = [
        (user_says(p.text), target(p.answer, style), target(p.near_miss, style)) for p in problems
    ]
    return pair_rows(pairs, tokenizer, max_length)


def _problems(split: str, options: dict[str, Any]) -> tuple[list[Problem], str]:
    """The problems, and the style of their targets."""
    style = options.pop("style", "plain")
    known = known_options(options, make_problems, besides=("style",))
    return make_problems(split=split, **known), style


def target(answer: str, style: str) -> str:
    if style not in ("plain", "reversed"):
        raise ValueError(f"dataset_kwargs.style must be plain or reversed, got {style!r}")
    return answer if style == "plain" else f"{answer[::-1]}>{answer}"


def make_problems(
    *,
    split: str,
    operators: Sequence[str] = ("+",),
    first_digits: Digits = 2,
    second_digits: Digits = 2,
    num_rows: int | None = None,
    seed: int = 0,
) -> list[Problem]:
    """`num_rows` distinct problems of `split` in random order; all of them if None.

    Digits are a number or a range [least, most]; 1 digit means 0 to 9, 2 digits 10 to 99.
    """
    held_out = wants_held_out(split)
    if num_rows is not None and not (isinstance(num_rows, int) and num_rows >= 0):
        raise ValueError(f"dataset_kwargs.num_rows must be a whole number, got {num_rows!r}")
    space = _ProblemSpace(
        tuple(_check_operators(operators)),
        _operand_range(first_digits, "first_digits"),
        _operand_range(second_digits, "second_digits"),
    )
    problems = _draw(space, held_out, num_rows, random.Random(seed))
    if num_rows is not None and len(problems) < num_rows:
        raise ValueError(
            f"dataset_kwargs.num_rows: only {len(problems)} distinct problems are in split "
            f"{split!r}, got {num_rows}; ask for fewer, or for more digits"
        )
    return problems


@dataclass(frozen=True, slots=True)
class _ProblemSpace:
    """All problems, numbered from 0, generated on access."""

    operators: tuple[str, ...]
    first: range
    second: range

    def __len__(self) -> int:
        return len(self.operators) * len(self.first) * len(self.second)

    def __getitem__(self, index: int) -> Problem:
        index, second = divmod(index, len(self.second))
        operator, first = divmod(index, len(self.first))
        return Problem(self.first[first], self.operators[operator], self.second[second])


def _draw(
    space: _ProblemSpace, held_out: bool, num_rows: int | None, rng: random.Random
) -> list[Problem]:
    if num_rows is None and len(space) > MAX_ALL_ROWS:
        raise ValueError(
            f"dataset_kwargs.num_rows: set it, these options describe {len(space)} problems"
        )
    # Slightly more than the split's share needs; the whole space if that was too few.
    share = 1 / ONE_IN if held_out else 1 - 1 / ONE_IN
    enough = len(space) if num_rows is None else int(1.2 * num_rows / share) + 100
    for size in (min(enough, len(space)), min(4 * enough, len(space)), len(space)):
        indices = rng.sample(range(len(space)), size)
        problems = [p for p in map(space.__getitem__, indices) if p.held_out == held_out]
        if num_rows is None or len(problems) >= num_rows or size == len(space):
            break
    return problems[:num_rows]


def _operand_range(digits: Digits, name: str) -> range:
    match digits:
        case int():
            least = most = digits
        case [int() as least, int() as most]:
            pass
        case _:
            least = most = 0
    if not 1 <= least <= most:
        raise ValueError(
            f"dataset_kwargs.{name} must be a number of digits or [least, most], got {digits}"
        )
    return range(0 if least == 1 else 10 ** (least - 1), 10**most)


def _check_operators(operators: Sequence[str]) -> Sequence[str]:
    known = isinstance(operators, Sequence) and all(o in ("+", "-", "*") for o in operators)
    if not known:
        raise ValueError(f"dataset_kwargs.operators may hold + - *, got {operators!r}")
    return operators


def build_char_tokenizer(folder: str | Path) -> Any:
    """Write to `folder`, and return, a tokenizer with one token per character (58 tokens).

    Its chat template is the bare text of the messages, so a prompt is exactly the problem.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    characters = string.digits + "+-*/=><()[]#,.?:! \n" + string.ascii_lowercase
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
    tokenizer.save_pretrained(str(folder))
    return tokenizer
