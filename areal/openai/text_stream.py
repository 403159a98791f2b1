"""Incremental detokenisation: tokens to the text a client sees, piece by piece.

    stream = TextStream(tokenizer, gconfig)
    stream.push([5, 7]) + stream.push([9]) + stream.finish() == visible_text(tokenizer, [5, 7, 9])

Invariant: however tokens are split into pushes, the pieces join to the same text. A piece never
ends within a UTF-8 character or a possible stop string: both are held until the next push. The text
ends before the first complete stop string.

`token_text` and `token_bytes` decode a single token, which may be part of a character.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from areal.api.config.inference import GenerationHyperparameters

_UNFINISHED = "\ufffd"  # what decoders write for an incomplete or invalid character


def visible_text(
    tokenizer: Any,
    tokens: list[int],
    gconfig: GenerationHyperparameters,
    *,
    keep: frozenset[str] = frozenset(),
) -> str:
    """The whole output as text. `tokens` must not include a trailing stop token."""
    stream = TextStream(tokenizer, gconfig, keep=keep)
    return stream.push(tokens) + stream.finish()


class TextStream:
    """`keep`: special tokens shown even where `skip_special_tokens` hides the others."""

    def __init__(
        self,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        *,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self._decoder = _Decoder(tokenizer, gconfig.skip_special_tokens, keep)
        self._stops = gconfig.stop or []
        # A stop string counts only if all of it comes after the first `min_new_tokens` tokens.
        self._num_unwatched = gconfig.min_new_tokens if self._stops else 0
        self._held = ""  # decoded, possibly the start of a stop string
        self.stop_string: str | None = None  # the one that was found: the text is complete

    def push(self, tokens: list[int]) -> str:
        """The text that is final now, without what was returned before."""
        unwatched, tokens = tokens[: self._num_unwatched], tokens[self._num_unwatched :]
        free = ""
        if unwatched:
            self._num_unwatched -= len(unwatched)
            free = self._decoder.push(unwatched)
        return free + self._watch(self._decoder.push(tokens)) if tokens else free

    def finish(self) -> str:
        """The text that was held back."""
        text = self._watch(self._decoder.finish()) + self._held
        self._held = ""
        return text

    def _watch(self, piece: str) -> str:
        if not self._stops:
            return piece
        if self.stop_string is not None:
            return ""
        text = self._held + piece
        found = _find_stop(text, self._stops)
        if found is None:
            cut = len(text) - _overlap(text, self._stops)
            self._held = text[cut:]
        else:
            cut, self.stop_string = found
            self._held = ""
        return text[:cut]


def _find_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that is completed first, reading from the left, and its start."""
    found = [(text.find(stop), stop) for stop in stops]
    ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
    return min(ends)[1:] if ends else None


def _overlap(text: str, stops: list[str]) -> int:
    """Length of the longest suffix of `text` that is a prefix of a stop string."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class _Decoder:
    """Decodes the newest tokens together with those just before them.

    Some tokenizers decode a token differently at the start of a text, so the preceding tokens are
    decoded with it and their part is cut off.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, keep: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._hidden: frozenset[int] = frozenset()  # ids left out before decoding
        if skip_special_tokens and keep:
            self._hidden = _special_ids_without(tokenizer, keep)
            self._skip_special_tokens = False
        self._context: list[int] = []  # already returned
        self._fresh: list[int] = []  # tokens after `_context`, not fully returned
        # Characters of decode(context + fresh) already returned; None: exactly those of context.
        self._num_shown: int | None = 0

    def push(self, tokens: list[int]) -> str:
        self._fresh += [t for t in tokens if t not in self._hidden] if self._hidden else tokens
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
        """The rest, including bytes that did not become a character."""
        if not self._fresh:
            return ""
        return self._text(self._context + self._fresh)[self._num_shown :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


def _special_ids_without(tokenizer: Any, keep: frozenset[str]) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(i for i, token in added if token.special and token.content not in keep)


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_text(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def marks_of(tokenizer: Any) -> dict[str, int]:
    """Added tokens that a grammar must name by number, because text never means them.

    They are the special ones and those in angle brackets: llguidance takes `<tool_call>` for
    special, though Qwen's tokenizers say that it is not.
    """
    added = tokenizer.added_tokens_decoder.items()
    return {
        token.content: number
        for number, token in added
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """None if the tokenizer does not expose bytes."""
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
    """Byte-level vocabularies map every byte to one printable letter.

    Bytes that are printable in Latin-1 map to themselves, the others to code points from 256 on, in
    order.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    letters.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return letters
