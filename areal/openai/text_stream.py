"""Tokens into the text a client sees, piece by piece.

    stream = TextStream(tokenizer, gconfig)
    stream.push([5, 7]) + stream.push([9]) + stream.finish() == visible_text(tokenizer, [5, 7, 9])

Invariant: however the tokens are cut into pushes, the pieces join to the same text. A piece never
ends within a UTF-8 character, nor within what may become a stop string: both wait for the next
push. The text ends before the first stop string that is complete.

What one token is by itself: its text, and its bytes when it is only a part of a character.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from areal.api.config.inference import GenerationHyperparameters

_UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character (yet)


def visible_text(tokenizer: Any, tokens: list[int], gconfig: GenerationHyperparameters) -> str:
    """The whole output as text. Leave a stop token out of `tokens`: it is not text."""
    stream = TextStream(tokenizer, gconfig)
    return stream.push(tokens) + stream.finish()


class TextStream:
    def __init__(self, tokenizer: Any, gconfig: GenerationHyperparameters) -> None:
        self._decoder = _Decoder(tokenizer, skip_special_tokens=gconfig.skip_special_tokens)
        self._stops = gconfig.stop or []
        # A stop string counts when all of it comes after the first `min_new_tokens` tokens.
        self._num_unwatched = gconfig.min_new_tokens if self._stops else 0
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self.stopped = False  # a stop string was found: the text is complete

    def push(self, tokens: list[int]) -> str:
        """The text that is certain now, without what was returned before."""
        unwatched, tokens = tokens[: self._num_unwatched], tokens[self._num_unwatched :]
        free = ""
        if unwatched:
            self._num_unwatched -= len(unwatched)
            free = self._decoder.push(unwatched)
        return free + self._watch(self._decoder.push(tokens)) if tokens else free

    def finish(self) -> str:
        """What was held back."""
        text = self._watch(self._decoder.finish()) + self._held
        self._held = ""
        return text

    def _watch(self, piece: str) -> str:
        if not self._stops:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece
        cut = find_stop(text, self._stops)
        self.stopped = cut is not None
        if cut is None:
            cut = len(text) - _overlap(text, self._stops)
            self._held = text[cut:]
        else:
            self._held = ""
        return text[:cut]


def find_stop(text: str, stops: list[str]) -> int | None:
    """Where the stop string begins that is complete first, read from the left."""
    found = [(text.find(stop), stop) for stop in stops]
    ends = [(start + len(stop), start) for start, stop in found if start >= 0]
    return min(ends)[1] if ends else None


def _overlap(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class _Decoder:
    """Decodes the newest tokens together with those just before them.

    Some tokenizers write a token in another way at the beginning of a text: the tokens before it
    are decoded with it, and their part is cut off.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # shown already
        self._fresh: list[int] = []  # after it, not all shown
        # Characters of the text of context and fresh that were returned; None: those of context.
        self._num_shown: int | None = 0

    def push(self, tokens: list[int]) -> str:
        self._fresh += tokens
        if self._num_shown is None:
            self._num_shown = len(self._text(self._context))
        text = self._text(self._context + self._fresh)
        stable = text.rstrip(_UNFINISHED)
        piece = text[self._num_shown : len(stable)]
        self._num_shown = max(self._num_shown, len(stable))
        if piece and len(stable) == len(text):
            self._context, self._fresh, self._num_shown = self._fresh, [], None
        return piece

    def finish(self) -> str:
        """The rest, with what is not a character and will not become one."""
        if not self._fresh:
            return ""
        return self._text(self._context + self._fresh)[self._num_shown :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_text(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """None when the tokenizer does not tell."""
    text = token_text(tokenizer, token)
    if "\ufffd" not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if match := _BYTE_FALLBACK.fullmatch(piece or ""):
        return bytes([int(match[1], 16)])
    byte_of = _byte_of_letter()
    if piece and all(letter in byte_of for letter in piece):
        return bytes(byte_of[letter] for letter in piece)
    return None


@cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies write every byte as one visible letter.

    Bytes that are visible in Latin-1 stand for themselves; the others take the letters from 256 on,
    in their order.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    letters.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return letters
