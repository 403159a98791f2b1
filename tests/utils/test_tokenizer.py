"""Loading tokenizers, and the one way a chat becomes tokens."""

from __future__ import annotations

import json

import pytest

from areal.dataset.arithmetic import build_char_tokenizer
from areal.utils.tokenizer import chat_prompt_ids, chat_prompts_ids, load_hf_tokenizer, replies_ids


@pytest.fixture
def folder(tmp_path):
    build_char_tokenizer(tmp_path)
    return tmp_path


def test_prompts_one_by_one_and_together(folder):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% if enable_thinking %}?{% endif %}{% endif %}"
    )
    tokenizer = load_hf_tokenizer(str(folder))
    chats = [[{"role": "user", "content": text}] for text in ("1+1=", "20+3=")]
    texts = [tokenizer.decode(ids) for ids in chat_prompts_ids(chats, tokenizer)]
    assert texts == ["user:1+1=\nassistant:", "user:20+3=\nassistant:"]
    assert tokenizer.decode(chat_prompt_ids(chats[0], tokenizer)) == texts[0]
    thinking = chat_prompt_ids(chats[0], tokenizer, enable_thinking=True)
    assert tokenizer.decode(thinking) == texts[0] + "?"


def test_replies_end_with_the_end_token(folder):
    tokenizer = load_hf_tokenizer(str(folder))
    assert [tokenizer.decode(ids) for ids in replies_ids(["2", "23"], tokenizer)] == [
        "2<eos>",
        "23<eos>",
    ]


def test_a_tokenizer_without_chat_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template; take the instruct version") as e:
        load_hf_tokenizer(str(folder))
    assert str(folder) in str(e.value)


def test_a_missing_pad_token_becomes_the_end_token(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_hf_tokenizer(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_wrong_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_hf_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_hf_tokenizer(str(tmp_path))
