"""Tokens to text in pieces: the same text however they come, cut before the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import EOS, IM_END, SPECIAL, byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from areal.api.config.inference import GenerationHyperparameters
from areal.openai.text_stream import TextStream, visible_text

TOKENIZER = byte_tokenizer()
tokens = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30)
texts = st.text("STOP ü€😀\n", max_size=20)


def gconfig(**options):
    return GenerationHyperparameters(**options)


def pieces_of(stream, ids, sizes):
    """The pieces when `ids` come in groups of these sizes, the rest one by one."""
    pieces, position = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(stream.push(ids[position : position + size]))
        position += size
    return [*pieces, stream.finish()]


@given(tokens, st.lists(st.integers(1, 4)), st.booleans())
def test_pieces_join_to_the_decoded_text(ids, sizes, skip):
    pieces = pieces_of(TextStream(TOKENIZER, gconfig(skip_special_tokens=skip)), ids, sizes)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(tokens, st.lists(st.integers(1, 4)))
def test_special_tokens_that_are_kept(ids, sizes):
    keep = frozenset(["<|im_end|>", "<not a token>"])
    stream = TextStream(TOKENIZER, gconfig(), keep=keep)
    shown = [token for token in ids if token >= len(SPECIAL) or token == IM_END]
    assert "".join(pieces_of(stream, ids, sizes)) == TOKENIZER.decode(shown)
    assert visible_text(TOKENIZER, ids, gconfig(skip_special_tokens=False), keep=keep) == (
        TOKENIZER.decode(ids)
    )


@given(texts, st.lists(st.integers(1, 4)))
def test_no_piece_splits_a_character(text, sizes):
    pieces = pieces_of(TextStream(TOKENIZER, gconfig()), TOKENIZER.encode(text), sizes)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@given(texts, st.lists(st.integers(1, 4)), st.lists(st.text("STOP ü", min_size=1), min_size=1))
def test_the_text_ends_before_the_stop_string_that_is_complete_first(text, sizes, stops):
    options = gconfig(stop=stops)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    ids = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER, options)
    assert "".join(pieces_of(stream, ids, sizes)) == expected
    assert (stream.stop_string is not None) == bool(ends)
    assert visible_text(TOKENIZER, ids, options) == expected


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    stream = TextStream(TOKENIZER, gconfig(stop=["STOP", "TOM"]))
    pieces = [stream.push(TOKENIZER.encode(letter)) for letter in "aSTOMb"]
    assert pieces == ["a", "", "", "", "S", ""]
    stream = TextStream(TOKENIZER, gconfig(stop=["STOP"]))
    pieces = [stream.push(TOKENIZER.encode(letter)) for letter in "aSTAST"]
    assert pieces == ["a", "", "", "STA", "", ""] and stream.finish() == "ST"


def test_stop_strings_count_after_the_least_number_of_tokens():
    ids = TOKENIZER.encode("aSb") + TOKENIZER.encode("aSb")
    options = gconfig(stop=["S"], min_new_tokens=3)
    assert visible_text(TOKENIZER, ids, options) == "aSba"
    assert "".join(pieces_of(TextStream(TOKENIZER, options), ids, [])) == "aSba"


def test_special_tokens():
    ids = [*TOKENIZER.encode("a"), IM_END, *TOKENIZER.encode("b"), EOS]
    assert visible_text(TOKENIZER, ids, gconfig()) == "ab"
    shown = visible_text(TOKENIZER, ids, gconfig(skip_special_tokens=False))
    assert shown == "a<|im_end|>b<|eos|>"


@pytest.mark.parametrize("sizes", [[], [2], [3, 1]])
def test_a_tokenizer_that_drops_the_space_of_a_first_word(sizes):
    core = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<unk>": 3}, "<unk>"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    pieces = pieces_of(TextStream(tokenizer, gconfig()), [0, 1, 2, 1], sizes)
    assert "".join(pieces) == "a bc b"
