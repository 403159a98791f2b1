"""What one token is by itself: its text, and its bytes when it is only a part of a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

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
