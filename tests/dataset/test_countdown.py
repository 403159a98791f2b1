"""Countdown problems made on the spot and read from files, and what their reward accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config.run import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import build_char_tokenizer
from areal.dataset.countdown import make_problems
from areal.reward.countdown import countdown_reward_fn

SAMPLE = Path(__file__).parents[1] / "data" / "countdown_sample"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(path, tokenizer, *, row_type="rl", split="train", **kwargs):
    config = DatasetConfig(path=str(path), type=row_type, dataset_kwargs=kwargs)
    return get_custom_dataset(split, config, tokenizer)


@given(
    split=st.sampled_from(["train", "test"]),
    operands=st.sampled_from([2, [2, 3], [3, 4]]),
    seed=st.integers(0, 2**32),
)
def test_every_problem_made_can_be_solved_within_the_bounds(split, operands, seed):
    problems = make_problems(
        split=split, num_rows=5, num_operands=operands, max_number=50, max_target=60, seed=seed
    )
    least, most = operands if isinstance(operands, list) else (operands, operands)
    assert len({problem.key for problem in problems}) == 5
    for problem in problems:
        assert least <= len(problem.nums) <= most
        assert 1 <= problem.target <= 60 and max(problem.nums) <= 50
        row = {"answer": str(problem.target), "nums": list(problem.nums)}
        assert countdown_reward_fn("", problem.solution, [], [], **row) == 1.0


def test_train_and_test_share_no_problem():
    train = make_problems(split="train", num_rows=400, num_operands=2, max_number=30)
    test = make_problems(split="test", num_rows=40, num_operands=2, max_number=30, seed=7)
    assert not {problem.key for problem in train} & {problem.key for problem in test}
    assert train == make_problems(split="train", num_rows=400, num_operands=2, max_number=30)


def test_rl_rows_made_on_the_spot(tokenizer):
    rows = load("countdown", tokenizer, num_rows=20, style="short", num_operands=3)
    for row in rows:
        nums = ",".join(map(str, row["nums"]))
        assert row["messages"] == [{"role": "user", "content": f"{row['answer']} from {nums}:"}]


def test_sft_rows_hold_a_solution(tokenizer):
    rows = load("countdown", tokenizer, row_type="sft", num_rows=10, style="short")
    rl_rows = load("countdown", tokenizer, num_rows=10, style="short")
    for row, question in zip(rows, rl_rows, strict=True):
        prompt = row["loss_mask"].count(0)
        reply = tokenizer.decode(row["input_ids"][prompt:-1])
        assert countdown_reward_fn("", reply, [], [], **question) == 1.0
    (row,) = load("countdown", tokenizer, row_type="sft", num_rows=1)
    assert tokenizer.decode(row["input_ids"]).endswith("</answer><eos>")


def test_rows_of_a_file_in_the_hubs_schema(tokenizer):
    raw = [json.loads(line) for line in (SAMPLE / "train.jsonl").read_text().splitlines()]
    rows = load(SAMPLE, tokenizer, loader="countdown")
    assert [(row["nums"], int(row["answer"])) for row in rows] == [
        (source["nums"], source["target"]) for source in raw
    ]
    assert "<answer>" in rows[0]["messages"][0]["content"]
    assert len(load(SAMPLE, tokenizer, loader="countdown", num_rows=2)) == 2


def test_one_in_ten_of_the_hubs_single_split_is_held_out(tokenizer, tmp_path, monkeypatch):
    name = "Jiayi-Pan/Countdown-Tasks-3to4"  # here a folder, read in place of the hub
    (tmp_path / name).mkdir(parents=True)
    rows = [{"nums": [n, n + 1, n + 2], "target": n + 5} for n in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name / "train.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    train, test = (load(name, tokenizer, split=split) for split in ("train", "test"))
    assert 15 <= len(test) <= 50 and len(train) + len(test) == 300
    assert not {row["answer"] for row in train} & {row["answer"] for row in test}


def test_wrong_sources_and_options_are_explained(tokenizer, tmp_path):
    with pytest.raises(RuntimeError, match="'Jiayi-Pan/Countdown-Tasks-3to4' is not a local"):
        load("Jiayi-Pan/Countdown-Tasks-3to4", tokenizer)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"numbers": [1, 2], "target": 3}\n')
    with pytest.raises(ValueError, match="row 0 has no column nums; found numbers, target"):
        load(file, tokenizer, loader="countdown")
    with pytest.raises(ValueError, match="dataset_kwargs.seed: the problems of .* are given"):
        load(SAMPLE, tokenizer, loader="countdown", seed=1)
    with pytest.raises(ValueError, match="holds no solutions to learn; write countdown"):
        load(SAMPLE, tokenizer, loader="countdown", row_type="sft")
    with pytest.raises(ValueError, match="style must be short or words, got 'rhyme'"):
        load("countdown", tokenizer, style="rhyme")
    with pytest.raises(ValueError, match="dataset_kwargs.num_rows must be at least 1, got 0"):
        load("countdown", tokenizer, num_rows=0)
    with pytest.raises(ValueError, match="dataset_kwargs.digits: unknown; expected one of max_"):
        load("countdown", tokenizer, digits=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_operands": 1}, "num_operands must be a number from 2 to 8"),
        ({"num_operands": [4, 3]}, "num_operands must be"),
        ({"max_target": 0}, "max_target must be at least 1, got 0"),
        ({"split": "dev"}, "dataset.split must be train"),
        ({"num_operands": 2, "max_number": 3}, "num_rows: found only .*, wanted 500"),
    ],
)
def test_impossible_problems_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_problems(**{"split": "train", "num_rows": 500, **options})
