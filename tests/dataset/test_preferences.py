"""Pairs of a better and a worse reply: HH-RLHF from its sample, and arithmetic made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.api.config.run import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import build_char_tokenizer, make_problems
from areal.dataset.hhrlhf import read_dialogue, read_pair
from areal.reward.gsm8k import gsm8k_reward_fn

SAMPLE = Path(__file__).parents[1] / "data" / "hh_rlhf_sample"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(path, tokenizer, *, row_type="rw", split="train", max_length=None, **kwargs):
    config = DatasetConfig(path=str(path), dataset_kwargs=kwargs, max_length=max_length)
    config.type = row_type
    return get_custom_dataset(split, config, tokenizer)


@pytest.mark.parametrize("row_type", ["rw", "dpo"])
def test_rows_share_the_dialogue_and_differ_in_the_last_reply(tokenizer, row_type):
    rows = load(SAMPLE, tokenizer, row_type=row_type, loader="hh-rlhf")
    assert len(rows) == 4  # two of the six are no pair
    for row in rows:
        assert set(row) == {"chosen_ids", "rejected_ids", "prompt_len"}
        prompt_len = row["prompt_len"]
        assert row["chosen_ids"][:prompt_len] == row["rejected_ids"][:prompt_len]
        assert row["chosen_ids"][prompt_len:] != row["rejected_ids"][prompt_len:]
        for ids in (row["chosen_ids"], row["rejected_ids"]):
            assert len(ids) > prompt_len > 0 and ids[-1] == tokenizer.eos_token_id
    reply = rows[1]["rejected_ids"][rows[1]["prompt_len"] :]
    assert tokenizer.decode(reply) == "<unk>hy do you ask?<eos>"


def test_a_dialogue_in_one_text():
    text = '\n\nHuman: hi\n\nAssistant: Hello.\n\nSay more: "Human: x".\n\nHuman: bye\n\nAssistant:'
    assert read_dialogue(text) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": 'Hello.\n\nSay more: "Human: x".'},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    "chosen, rejected",
    [
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a"),
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: c\n\nAssistant: d"),
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: b"),
        ("b", "c"),
        ("", ""),
    ],
)
def test_texts_that_are_no_pair(chosen, rejected):
    assert read_pair(chosen, rejected) is None


def test_long_pairs_are_left_out_by_the_longer_text(tokenizer):
    rows = load(SAMPLE, tokenizer, loader="hh-rlhf", max_length=60)
    assert 0 < len(rows) < 4
    assert all(max(map(len, (row["chosen_ids"], row["rejected_ids"]))) <= 60 for row in rows)


def test_wrong_sources_are_explained(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset.path: /no/hh-rlhf does not exist"):
        load("/no/hh-rlhf", tokenizer)
    with pytest.raises(RuntimeError, match="'Anthropic/hh-rlhf' is not a local file or folder"):
        load("hh-rlhf", tokenizer)
    file = tmp_path / "hh-rlhf"
    file.write_text('{"chosen": "a", "worse": "b"}\n')
    with pytest.raises(ValueError, match="row 0 has no column rejected; found chosen, worse"):
        load(file, tokenizer)
    file.write_text('{"chosen": "a", "rejected": "b"}\n')
    with pytest.raises(ValueError, match="has no row in split 'train'"):
        load(file, tokenizer)
    with pytest.raises(ValueError, match="dataset.type: hh-rlhf has types dpo, rw, got 'sft'"):
        load(SAMPLE, tokenizer, row_type="sft", loader="hh-rlhf")


@pytest.mark.parametrize("style", ["plain", "reversed"])
def test_arithmetic_prefers_the_right_answer_to_a_near_miss(tokenizer, style):
    rows = load("arithmetic", tokenizer, num_rows=50, style=style, operators=["+", "-", "*"])
    problems = make_problems(split="train", num_rows=50, operators=["+", "-", "*"])
    assert len(rows) == 50
    for row, problem in zip(rows, problems, strict=True):
        texts = [tokenizer.decode(row[key][:-1]) for key in ("chosen_ids", "rejected_ids")]
        assert all(text.startswith(problem.text) for text in texts)
        replies = [text[row["prompt_len"] :] for text in texts]
        rewards = [gsm8k_reward_fn("", reply, [], [], answer=problem.answer) for reply in replies]
        assert rewards == [1.0, 0.0]
