"""Stop strings: which token completes one.

A stop string ends generation, but the engine sees tokens. A `StopWatch` belongs to one request: it
is fed the tokens as they come, decodes the last few of them where a stop string may just have been
completed, and tells the token that did. Strings may span tokens and tokens parts of characters;
special tokens count with their text. `visible_text` cuts the text before the string.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from areal.openai import token_text

_UNFINISHED = "\ufffd"  # in the text of a token that holds a part of a character


class StopWatch:
    """
    watch = StopWatch(tokenizer, ["\\n\\n", "END"])
    watch.feed([5, 7])      # None: go on
    watch.feed([9, 4, 4])   # 1: the output ends with token 4, the next one is dropped
    """

    def __init__(self, tokenizer: Any, stops: list[str], *, min_tokens: int = 0) -> None:
        """A stop string counts when all of it comes after the first `min_tokens` tokens."""
        self._tokenizer = tokenizer
        self._stops = stops
        self._num_unwatched = min_tokens
        self._last_letters = {stop[-1] for stop in stops}
        # A token holds at least a byte of what it writes, so a stop string is in this many.
        longest = max(len(stop.encode()) for stop in stops)
        self._tail: deque[int] = deque(maxlen=longest + 4)
        self._may_complete: dict[int, bool] = {}  # by token

    def feed(self, tokens: list[int]) -> int | None:
        """Index in `tokens` of the one that completes the first stop string, None without one."""
        start = min(self._num_unwatched, len(tokens))
        self._num_unwatched -= start
        for index in range(start, len(tokens)):
            self._tail.append(tokens[index])
            if self._can_complete(tokens[index]) and self._is_complete():
                return index
        return None

    def _can_complete(self, token: int) -> bool:
        """Whether it can write the last letter of a stop string: most tokens are not decoded."""
        known = self._may_complete.get(token)
        if known is None:
            letters = set(token_text(self._tokenizer, token))
            # Some tokenizers write white space only between tokens.
            known = _UNFINISHED in letters or not self._last_letters.isdisjoint(letters)
            known = known or any(letter.isspace() for letter in self._last_letters)
            self._may_complete[token] = known
        return known

    def _is_complete(self) -> bool:
        text = self._tokenizer.decode(
            list(self._tail), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self._stops)
