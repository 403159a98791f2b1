"""The gsm8k and math_verify rewards: right, wrong, and when sympy is not even imported."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areal.reward import REWARD_FNS
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.reward.math_verify import math_verify_reward_fn, same_answer
from areal.sandbox.pool import AsyncRewardWrapper
from areal.utils.import_path import load_named

GSM8K_SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k_sample" / "train.jsonl"


def judge(fn, completion, answer):
    return fn("question", completion, [1], [2], answer=answer, messages=[])


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        ("83", "83", 1.0),
        ("38>83", "83", 1.0),
        ("83>38", "83", 0.0),
        ("53->-35", "-35", 1.0),
        ("The total is 72 clips.", "48+24 = <<48+24=72>>72\n#### 72", 1.0),
        (r"\boxed{1,000} dollars", "#### 1000", 1.0),
        (r"\boxed{72.00}", "#### 72", 1.0),
        ("#### 71", "#### 72", 0.0),
        (r"\boxed{\frac{144}{2}}", "#### 72", 1.0),
        (r"\boxed{\frac{143}{2}}", "#### 72", 0.0),
        (r"\boxed{x}", "#### 72", 0.0),
        ("I do not know", "#### 72", 0.0),
        ("", "5", 0.0),
    ],
)
def test_gsm8k_reward(completion, answer, reward):
    assert judge(gsm8k_reward_fn, completion, answer) == reward


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        ("The answer is 2", "1/2", 0.0),
        ("The answer is 1/2.", "1/2", 1.0),
        ("0.5", "1/2", 1.0),
        ("50%", "1/2", 1.0),
        (r"so \(\frac{2}{4}\).", "1/2", 1.0),
        (r"$\sqrt{16}$", "4", 1.0),
        ("$10^3$", "1000", 1.0),
        ("3+2", "5", 1.0),
        ("3+2=5", "3+2", 1.0),
        ("8", "2^3", 1.0),
        ("2", "2^3", 0.0),
        ("3", "2^3", 0.0),
        (r"\boxed{0.0666668}", "0.066666793", 1.0),
        (r"\boxed{\frac{1}{10000000}}", "0.0000002", 0.0),
        (r"\boxed{2\pi}", "6.283185", 1.0),
        (r"\boxed{72 dollars}", "72", 1.0),
        (r"\boxed{72\text{ cm}^2}", "72", 1.0),
        (r"\boxed{72}", r"thus \boxed{\frac{144}{2}}", 1.0),
        ("She keeps $18 a day, so $18.", "18", 1.0),
        ("5", "There are 5 items", 1.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        (r"\boxed{x^2+2x}", "(x+1)^2", 0.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        ("(1,2)", "(1, 2)", 1.0),
        ("2", "(1, 2)", 0.0),
        ("3:2", "3:2", 1.0),
        ("2", "3:2", 0.0),
        (r"$\sqrt[3]{8}$", "2", 1.0),
        (r"$\sqrt[3]{8}$", "8", 0.0),
        (r"$1{,}234$", "1234", 1.0),
        ("1234", r"1{,}234", 1.0),
        (r"$18", r"\$18.00", 1.0),
        ("18>81 so 18", "18.", 1.0),
        ("the answer is 5", "+5", 1.0),
    ],
)
def test_any_other_answer_is_judged_by_mathematics(completion, answer, reward):
    assert judge(gsm8k_reward_fn, completion, answer) == reward


def restatements(number: str) -> list[str]:
    grouped = f"{int(number):,}"
    return [
        f"#### {number}",
        f"#### {grouped} dollars",
        f"The answer is ${grouped}.",
        f"so x = {number}",
        f"she needs {grouped} of them.",
        f"**{number}**",
        f"{number}%",
        f"{number}.00",
        rf"\boxed{{{number}}}",
        rf"\boxed{{\${grouped}}}",
        rf"\[ \boxed{{{number}\text{{ eggs}}}} \]",
        rf"$x = {number}$",
    ]


def test_every_solution_of_the_sample_earns_its_reward():
    rows = [json.loads(line) for line in GSM8K_SAMPLE.read_text().splitlines()]
    assert rows
    for row in rows:
        number = row["answer"].rpartition("####")[2].strip().replace(",", "")
        for answer in (row["answer"], number):
            assert judge(gsm8k_reward_fn, row["answer"], answer) == 1.0
            for said in restatements(number):
                assert judge(gsm8k_reward_fn, said, answer) == 1.0, (said, answer)
            for said in restatements(str(int(number) + 1)):
                assert judge(gsm8k_reward_fn, said, answer) == 0.0, (said, answer)


HOSTILE = {
    "tower": "9**9**9",
    "tower in LaTeX": r"\boxed{9^{9^{9}}}",
    "one over a tower": r"\boxed{\frac{1}{9^{9^{9}}}}",
    "e to the e": r"\boxed{e^{e^{e^{100}}}}",
    "factorial": r"\boxed{1000000!}",
    "division by zero": r"\boxed{\frac{1}{0}}",
    "plain division by zero": "1/0",
    "infinity": r"\boxed{\infty}",
    "a matrix": r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}",
    "a million letters": "a" * 1_000_000,
    "a million digits": "1" * 1_000_000,
    "a million digits in a box": r"\boxed{" + "1" * 1_000_000 + "}",
    "open boxes": r"\boxed{" * 140_000,
    "nested brackets": r"\boxed{" + "(" * 300 + "7" + ")" * 300 + "}",
    "nested roots": r"\boxed{" + r"\sqrt{" * 60 + "7" + "}" * 60 + "}",
    "a lone surrogate": "\\boxed{\ud83d}",
    "a lone surrogate in prose": "it is \ud83d 7 \ud83d",
    "null": "\\boxed{\x00}",
}


@pytest.mark.parametrize("fn", [gsm8k_reward_fn, math_verify_reward_fn])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_completion_is_wrong_and_nothing_else(fn, name):
    assert judge(fn, HOSTILE[name], "5") == 0.0


def test_what_takes_too_long_is_an_error_and_not_a_wrong_answer():
    with pytest.raises(TimeoutError, match="math-verify took longer than 5 s"):
        judge(gsm8k_reward_fn, r"\boxed{\binom{10000000}{5000000}}", "5")


@pytest.mark.parametrize("answer", ["9^9^9", "$9^{9^{9}}$"])
def test_a_row_whose_answer_cannot_be_computed_is_named(answer):
    with pytest.raises(ValueError, match="of the data row is too large"):
        judge(gsm8k_reward_fn, "5", answer)


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"thus \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x", 0.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        ("The answer is $2^{10}$.", "1024", 1.0),
        (r"\boxed{\frac{}}", "7", 0.0),
        (r"\boxed{}", "7", 0.0),
    ],
)
def test_math_verify_reward(completion, answer, reward):
    assert judge(math_verify_reward_fn, completion, answer) == reward


def test_an_answer_of_the_row_that_cannot_be_judged_raises():
    with pytest.raises(ValueError, match="no number in the answer 'unknown'"):
        judge(gsm8k_reward_fn, "5", "unknown")


def test_outside_a_main_thread_sympy_is_refused_not_guessed():
    errors = []

    def compare():
        try:
            same_answer("1/2", r"\frac{2}{4}")
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert "AsyncRewardWrapper" in errors[0]


def test_exact_matches_and_plain_numbers_never_import_sympy():
    code = r"""
import sys
from areal.reward.gsm8k import gsm8k_reward_fn as gsm8k
from areal.reward.math_verify import math_verify_reward_fn as verify
row = ("p", r"so \boxed{x^2+1}", [], [])
assert verify(*row, answer="x^2+1") == 1.0
assert gsm8k("p", "38>83", [], [], answer="83") == 1.0
assert gsm8k("p", "82.5", [], [], answer="83") == 0.0
assert gsm8k("p", "no idea", [], [], answer="83") == 0.0
assert not {"sympy", "math_verify", "torch"} & set(sys.modules), "heavy import"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("name", ["geometry3k", "gsm8k", "math_verify"])
async def test_by_name_and_in_a_worker(name):
    reward = AsyncRewardWrapper(load_named(name, REWARD_FNS, key="reward_fn"), max_workers=1)
    try:
        assert await reward("p", r"\boxed{\frac{6}{2}}", [1], [2], answer="3") == 1.0
        assert await reward("p", r"\boxed{\frac{6}{3}}", [1], [2], answer="3") == 0.0
    finally:
        reward.close()
