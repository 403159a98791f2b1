"""`areal chat` with a real model; lines come from stdin."""

from __future__ import annotations

import io

import pytest
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer

from areal.cli.main import main
from areal.evaluation.conversation import Conversation


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    write_byte_tokenizer(folder)
    return folder


def test_the_pieces_join_to_the_reply_and_a_turn_has_the_ones_before(model):
    pieces: list[str] = []
    with Conversation(str(model), max_new_tokens=12, seed=3) as conversation:
        first = conversation.say("Hello", pieces.append)
        assert "".join(pieces) == first and len(pieces) > 3
        with_history = conversation.say("Hello", pieces.append)
        conversation.begin()
        without = conversation.say("Hello", lambda piece: None)
    assert len({first, with_history, without}) == 3, "another prompt, another seed"
    with Conversation(str(model), max_new_tokens=12, seed=3) as conversation:
        assert conversation.say("Hello", lambda piece: None) == first


def test_lines_of_a_pipe(model, capsys, monkeypatch):
    lines = f"one\n\n/new\n{'long ' * 100}\ntwo\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", str(model), "--max-new-tokens", "5", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    with Conversation(str(model), max_new_tokens=5, temperature=0) as conversation:
        expected = [conversation.say("one", lambda piece: None)]
        conversation.begin()
        expected.append(conversation.say("two", lambda piece: None))
    assert out == f"{expected[0]}\n\n{expected[1]}\n"
    assert "/new begins a new conversation" in err, "a turn too long for the model says so"


def test_mistakes(model, tmp_path, capsys):
    for argv, message in (
        ([str(tmp_path)], "expected a run's folder"),
        ([str(model), "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        ([str(model), "--temperature", "-1"], "--temperature must be at least 0, got -1"),
    ):
        assert main(["chat", *argv]) == 2
        assert message in capsys.readouterr().err
