"""What a chat template writes for an image becomes the tokens that the decoder reads."""

from __future__ import annotations

import pytest
from tiny_vision import END, IMAGE, START, tiny_vision_config

from areal.models import decoder_args
from areal.models.vision.placeholders import expand_placeholders

ARGS = decoder_args(tiny_vision_config("gemma3")).vision
GRID = ARGS.whole_grid
SHOWN = [START, *[IMAGE] * 9, END]


class Lines:
    """A tokenizer of line breaks: up to four in one token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        full, rest = divmod(len(text), 4)
        return [44] * full + [40 + rest] * bool(rest)


@pytest.mark.parametrize(
    ("prompt", "count", "expected"),
    [
        ([5, START, 6], 1, [5, 42, *SHOWN, 42, 6]),
        ([5, 41, START, 41, 6], 1, [5, 43, *SHOWN, 43, 6]),  # line breaks that meet are one token
        ([5, START, START], 2, [5, 42, *SHOWN, 44, *SHOWN, 42]),
        ([START, 43], 1, [42, *SHOWN, 44, 41]),
        ([5, 44, 41, 6], 0, [5, 44, 41, 6]),
        ([5, *SHOWN, 41, 6], 1, [5, *SHOWN, 41, 6]),  # all there already
    ],
)
def test_an_image_has_an_empty_line_before_and_after_it(prompt, count, expected):
    assert expand_placeholders(prompt, [GRID] * count, ARGS, Lines()) == expected


@pytest.mark.parametrize(
    ("prompt", "count", "tokenizer", "message"),
    [
        ([5, START], 1, None, "without a tokenizer"),
        ([5, START], 2, Lines(), "1 that start one .62. for 2 images"),
        ([5, START, IMAGE, END], 1, Lines(), "has 1 image tokens"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(prompt, count, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        expand_placeholders(prompt, [GRID] * count, ARGS, tokenizer)
