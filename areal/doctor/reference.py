"""Does the reward tell a row's own answer from nonsense? Asked where the samples do not say it.

    told = await tell(reward, config.reward_fn, function, rows, encode)
    Told: rewards of two texts differ. Untold: in no row do they, or why nobody can know.

A reward that ignores the reply, or gives every text the same, teaches nothing however long a run
is; a hard task looks the same in the few samples of a look. The answer is a row's `answer`, in the
forms that rewards read: bare, after `####`, boxed, in brackets, in `<answer>`.
"""

from __future__ import annotations

import asyncio
import dis
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal.reward import REWARD_FNS
from areal.reward.answer_text import last_number
from areal.sandbox.pool import AsyncRewardWrapper, RewardError
from areal.workflow.chat import REWARD_ARGUMENTS

_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "[{}]", "<answer>{}</answer>")
_NONSENSE = ("", "no", "I do not know, and I do not care. " * 8, "-77777.25", "[] \\boxed{}")
# Shipped functions for which a right reply is a program, an expression, or what a model likes.
_NOT_BY_ANSWER = ("countdown", "llm_judge", "reward_model", "unit_tests")
# A function that calls one of these may read its arguments without naming them.
_SEE_ALL = {"locals", "vars", "eval", "exec", "_getframe", "currentframe"}


class Row(NamedTuple):
    number: int  # in the data set
    data: Mapping[str, Any]
    prompt: str
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Told:
    """For one row, its answer and nonsense earn rewards between these."""

    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Untold:
    why: str
    is_certain: bool = False  # the reward is at fault
    is_suspect: bool = False  # it may be, or reads a form that was not tried


async def tell(
    reward: AsyncRewardWrapper,
    name: str,
    function: Callable[..., Any],
    rows: Sequence[Row],
    encode: Callable[[str], list[int]],
) -> Told | Untold:
    """`function` is that of `reward`, `name` its `reward_fn` in the config, `encode` tokenizes."""
    if not reads_reply(function):
        return Untold(f"{name} reads neither the text nor the tokens of a reply", is_certain=True)
    if any(name in (one, REWARD_FNS[one]) for one in _NOT_BY_ANSWER):
        return Untold(f"{name} has no reply that is known to be right")
    rows = [row for row in rows if isinstance(row.data.get("answer"), str | int | float)]
    if not rows:
        return Untold("rows have no column 'answer' to try")
    earned: set[float] = set()
    for row in rows:
        answers = [form.format(one) for one in _answers(row) for form in _FORMS]
        right = await _earned(reward, row, answers, encode)
        wrong = await _earned(reward, row, _NONSENSE, encode)
        if not right or not wrong:
            return Untold(f"{name} raises for the answer of row {row.number}, or for nonsense")
        if len(right | wrong) > 1:
            return Told(min(right | wrong), max(right | wrong))
        earned |= wrong
    values = ", ".join(f"{value:g}" for value in sorted(earned))
    why = (
        f"in {len(rows)} rows the row's own answer, such as {str(rows[0].data['answer'])!r:.40}, "
        f"earns what nonsense earns: {values}"
    )
    return Untold(why, is_suspect=True)


def _answers(row: Row) -> list[str]:
    """The answer, and the number in it that some rewards read alone."""
    whole = str(row.data["answer"])
    number = last_number(whole)
    return [whole] if number in (None, whole) else [whole, number]


async def _earned(
    reward: AsyncRewardWrapper,
    row: Row,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
) -> set[float]:
    """Different rewards of the texts; without those for which the function raises."""
    columns = {key: value for key, value in row.data.items() if key not in REWARD_ARGUMENTS}
    calls = [
        reward.start(row.prompt, text, row.prompt_ids, encode(text), **columns) for text in texts
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for one in results:
        if isinstance(one, BaseException) and not isinstance(one, RewardError):
            raise one
    return {one for one in results if not isinstance(one, BaseException)}


def reads_reply(function: Callable[..., Any]) -> bool:
    """False if the code of a plain function provably never reads its second and fourth argument:
    the reply as text and as tokens. True if it does, and if nobody can tell."""
    if not isinstance(function, types.FunctionType):
        return True
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    if len(names) < 4 or _SEE_ALL & set(code.co_names):
        return True
    reply = {names[1], names[3]}
    return bool(reply & set(code.co_cellvars)) or any(
        instruction.opname.startswith("LOAD") and reply & _named_by(instruction.argval)
        for instruction in dis.get_instructions(code)
    )


def _named_by(value: Any) -> set[Any]:
    """One instruction may load two variables."""
    return set(value) if isinstance(value, tuple) else {value} if isinstance(value, str) else set()
