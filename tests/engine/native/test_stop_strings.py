"""StopWatch: the token that completes a stop string, however the tokens come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import IM_END, VOCAB_SIZE, byte_tokenizer

from areal.engine.native.sequence import StopWatch

TOKENIZER = byte_tokenizer()
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20)
texts = st.text("STOP ü€😀\n", max_size=20)
stops = st.lists(st.text("STOP ü€\n", min_size=1, max_size=5), min_size=1, max_size=3)


def fed(watch, ids, sizes):
    """Index of the completing token in `ids`, fed in groups of these sizes, then one by one."""
    position = 0
    for size in [*sizes, *[1] * len(ids)]:
        index = watch.feed(ids[position : position + size])
        if index is not None:
            return position + index
        position += size
    return None


def first_complete(ids, stops):
    """The same by decoding everything after each token."""
    for end in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:end], skip_special_tokens=False)
        if any(stop in text for stop in stops):
            return end - 1
    return None


@given(texts, tokens, texts, stops, st.lists(st.integers(1, 5)))
def test_it_is_the_token_after_which_the_text_holds_a_stop_string(a, noise, b, stops, sizes):
    ids = [*TOKENIZER.encode(a), *noise, *TOKENIZER.encode(b)]
    assert fed(StopWatch(TOKENIZER, stops), ids, sizes) == first_complete(ids, stops)


def test_strings_that_span_tokens_and_characters_that_do():
    ids = TOKENIZER.encode("a 😀!")
    assert len(ids) == 7
    assert fed(StopWatch(TOKENIZER, [" 😀"]), ids, []) == 5
    assert StopWatch(TOKENIZER, [" 😀"]).feed(ids) == 5
    assert StopWatch(TOKENIZER, ["x", "y"]).feed(ids) is None


def test_special_tokens_count_with_their_text():
    ids = [*TOKENIZER.encode("ab"), IM_END]
    assert StopWatch(TOKENIZER, ["b<|im_end|>"]).feed(ids) == 2


def test_the_first_tokens_do_not_count():
    ids = TOKENIZER.encode("abab")
    assert StopWatch(TOKENIZER, ["ab"]).feed(ids) == 1
    for unwatched in (1, 2):
        assert fed(StopWatch(TOKENIZER, ["ab"], min_tokens=unwatched), ids, []) == 3
        assert StopWatch(TOKENIZER, ["ab"], min_tokens=unwatched).feed(ids) == 3
