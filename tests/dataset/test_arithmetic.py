"""Arithmetic problems: what is drawn, what is held out, how targets are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config.run import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import Problem, build_char_tokenizer, make_problems, target
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.utils.tokenizer import load_hf_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(tokenizer, type, split="train", **kwargs):
    max_length = kwargs.pop("max_length", None)
    config = DatasetConfig(
        path="arithmetic", type=type, dataset_kwargs=kwargs, max_length=max_length
    )
    return get_custom_dataset(split, config, tokenizer)


def test_rl_rows(tokenizer):
    rows = load(tokenizer, "rl", num_rows=50, operators=["+", "-", "*"], second_digits=1)
    assert len(rows) == 50
    texts = [row["messages"][0]["content"] for row in rows]
    assert all(any(operator in text for text in texts) for operator in "+-*")
    for text, row in zip(texts, rows, strict=True):
        assert row["messages"] == [{"role": "user", "content": text}]
        assert str(eval(text.rstrip("="))) == row["answer"]


@pytest.mark.parametrize("style", ["plain", "reversed"])
def test_sft_rows_continue_the_prompt_that_rollouts_see(tokenizer, style):
    supervised = load(tokenizer, "sft", num_rows=20, style=style, seed=3)
    for row, rl_row in zip(supervised, load(tokenizer, "rl", num_rows=20, seed=3), strict=True):
        prompt, reply = rl_row["messages"][0]["content"], target(rl_row["answer"], style)
        assert tokenizer.decode(row["input_ids"]) == f"{prompt}{reply}<eos>"
        assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(reply) + 1)


def test_train_and_test_share_no_problem_not_even_mirrored():
    train = make_problems(split="train", first_digits=[1, 2], second_digits=[1, 2])
    test = make_problems(split="test", first_digits=[1, 2], second_digits=[1, 2], seed=99)
    assert len(train) + len(test) == 100 * 100
    assert 0.08 < len(test) / 10_000 < 0.12
    seen = {frozenset((p.first, p.second)) for p in train}
    assert not any(frozenset((p.first, p.second)) in seen for p in test)


def test_rows_are_distinct_and_a_function_of_the_seed():
    first, again, other = (
        make_problems(split="train", num_rows=500, first_digits=3, second_digits=3, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 500


@given(
    first=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    second=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    operator=st.sampled_from("+-*"),
    split=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 2**32),
)
def test_operands_have_the_digits_asked_for(first, second, operator, split, seed):
    ranges = [[least, least + more] for least, more in (first, second)]
    problems = make_problems(
        split=split,
        operators=[operator],
        first_digits=ranges[0],
        second_digits=ranges[1],
        num_rows=3,
        seed=seed,
    )
    for problem in problems:
        assert ranges[0][0] <= len(str(problem.first)) <= ranges[0][1]
        assert ranges[1][0] <= len(str(problem.second)) <= ranges[1][1]
        assert problem.held_out == (split == "test")


@pytest.mark.parametrize(
    "problem, answer, reversed_target",
    [
        (Problem(47, "+", 36), "83", "38>83"),
        (Problem(12, "-", 47), "-35", "53->-35"),
        (Problem(12, "*", 12), "144", "441>144"),
        (Problem(5, "+", 5), "10", "01>10"),
    ],
)
def test_both_target_styles_earn_the_reward(problem, answer, reversed_target):
    assert problem.answer == answer
    assert target(answer, "plain") == answer
    assert target(answer, "reversed") == reversed_target
    for text in (answer, reversed_target):
        assert gsm8k_reward_fn(problem.text, text, [], [], answer=answer) == 1.0


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"operators": ["/"]}, "operators may hold"),
        ({"first_digits": 0}, "first_digits must be"),
        ({"second_digits": [3, 2]}, "second_digits must be"),
        ({"num_rows": 10**6}, "only 7298 distinct problems are in split 'train'"),
        ({"first_digits": 6, "second_digits": 6}, "num_rows: set it"),
        ({"split": "dev"}, "dataset.split must be train"),
    ],
)
def test_impossible_options_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_problems(**{"split": "train", **kwargs})


def test_unknown_options_and_styles_are_refused(tokenizer):
    with pytest.raises(ValueError, match="style must be plain or reversed, got 'upside_down'"):
        load(tokenizer, "sft", style="upside_down", num_rows=5)
    with pytest.raises(
        ValueError, match="dataset_kwargs.digits: unknown; expected one of first_digits"
    ):
        load(tokenizer, "rl", digits=5)


def test_long_rows_are_left_out_and_an_empty_set_is_an_error(tokenizer):
    rows = load(tokenizer, "rl", max_length=4, num_rows=500, first_digits=[1, 2], second_digits=1)
    assert rows and all(len(row["messages"][0]["content"]) <= 4 for row in rows)
    with pytest.raises(ValueError, match="no row in split 'train' with at most 2 tokens"):
        load(tokenizer, "rl", max_length=2, num_rows=5)


def test_the_character_tokenizer_loads_beside_a_models_config(tmp_path):
    made = build_char_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 64}')
    loaded = load_hf_tokenizer(str(tmp_path))
    text = "x = (47+36)*5 - 1/2 > 38?\n"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode(text) == made.encode(text)
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, len(made))
