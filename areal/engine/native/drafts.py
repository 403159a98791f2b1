"""Drafts: tokens a request will likely draw next, read from what it and its siblings wrote.

Samples of one prompt often write the same sentences, and an answer often repeats its prompt. Where
the last tokens of an output stand elsewhere in the texts of its *group* (the prompt, and outputs to
it), the tokens after that place are a draft. A runner checks it in one pass: it draws a token at
every position of the draft, and keeps the draws up to the first that is not the draft's. Every kept
token is a draw from the model's own distribution given the tokens before it, by the request's own
random numbers: drafts change how many passes an output takes, not how its tokens are drawn.

A pass with drafts costs more than a plain one. So for each request the share of drafted tokens that
come true is measured, also in plain passes, where a draft is compared with what was drawn, and
drafts are checked only while that promises a gain (`best_length`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from areal.engine.native.sampler import has_rare_options
from areal.engine.native.sequence import Sequence

_MATCH = 3  # tokens that must stand elsewhere
_PLACES = 4  # places of the same tokens that are compared, the newest
_MAX_COMPARED = 32  # tokens before a place that are compared, to find the best one
_MIN_GAIN = 1.05
_NEWEST = 1 / 16  # weight of one token in the measured share
# To index a text costs the host up to a microsecond a token: short outputs are not worth it, nor is
# the far end of a long prompt.
_MIN_OUTPUT = 32
_MAX_PROMPT = 1024
# Packed numbers: token ids within a key, and of a place its text above its position.
_BITS = 32
_LOW = (1 << _BITS) - 1
_KEY = (1 << _BITS * _MATCH) - 1


@dataclass(slots=True, eq=False)
class _Text:
    """A prompt, or an output that may still grow."""

    tokens: list[int] | tuple[int, ...]
    num_indexed: int = _MATCH - 1


@dataclass(slots=True, eq=False)
class _Group:
    """The texts of all requests with one prompt.

    The index is of plain numbers, packed: a tuple and a list for each token would make Python's
    garbage collector scan the whole process again and again, for seconds at a time.
    """

    prompt: tuple[int, ...]
    num_members: int = 0
    _texts: list[_Text] = field(default_factory=list)
    # A place is a text and the position after _MATCH tokens of it.
    _newest: dict[int, int] = field(default_factory=dict)  # key of _MATCH tokens -> place
    _earlier: dict[int, int] = field(default_factory=dict)  # place -> place of the same tokens

    def add(self, tokens: list[int] | tuple[int, ...]) -> None:
        self._texts.append(_Text(tokens))

    def draft(self, output: list[int], limit: int) -> list[int]:
        """At most `limit` tokens to follow `output`; none where nothing like its end is known.

        A draft is no longer than what it rests on: the tokens that are equal before it.
        """
        self._index()
        recent = output[-_MAX_COMPARED:]
        if len(recent) < _MATCH:
            recent = [*self.prompt[len(recent) - _MATCH :], *recent]
        best: tuple[_Text, int] | None = None
        longest = 0
        for text, place in self._places(_key(recent[-_MATCH:])):
            if place < len(text.tokens) and (length := _match(text, place, recent)) > longest:
                best, longest = (text, place), length
        if best is None:
            return []
        text, place = best
        return list(text.tokens[place : place + min(limit, longest)])

    def _places(self, key: int) -> Iterator[tuple[_Text, int]]:
        """Newest first."""
        packed = self._newest.get(key)
        for _ in range(_PLACES):
            if packed is None:
                return
            yield self._texts[packed >> _BITS], packed & _LOW
            packed = self._earlier.get(packed)

    def _index(self) -> None:
        newest, earlier = self._newest, self._earlier
        for number, text in enumerate(self._texts):
            end = len(text.tokens)
            if text.num_indexed >= end:
                continue
            start = text.num_indexed + 1 - _MATCH
            key = _key(text.tokens[start : text.num_indexed])
            place = number << _BITS | text.num_indexed
            for token in text.tokens[text.num_indexed :]:
                key = (key << _BITS | token) & _KEY
                place += 1
                known = newest.get(key)
                if known is not None:
                    earlier[place] = known
                newest[key] = place
            text.num_indexed = end


@dataclass(slots=True, eq=False)
class _Member:
    group: _Group
    share: float = 0.0  # of drafted tokens that came true, lately


class Drafts:
    """The groups of an engine's requests, and how often their drafts came true."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._members: dict[Sequence, _Member] = {}

    def join(self, sequence: Sequence) -> None:
        if not can_draft(sequence):
            return
        prompt = sequence.prompt
        group = self._groups.get(prompt)
        if group is None:
            group = self._groups[prompt] = _Group(prompt)
            group.add(prompt[-_MAX_PROMPT:])
        group.num_members += 1
        group.add(sequence.output_tokens)
        self._members[sequence] = _Member(group)

    def leave(self, sequence: Sequence) -> None:
        """Its text stays while siblings run."""
        member = self._members.pop(sequence, None)
        if member is not None:
            member.group.num_members -= 1
            if not member.group.num_members:
                del self._groups[member.group.prompt]

    def best_length(
        self, sequences: Collection[Sequence], limit: int, cost: Callable[[int], float]
    ) -> int:
        """How many tokens to draft for each of `sequences`, at most `limit`; 0 where that gains
        nothing. `cost` of a pass with so many, in plain passes."""
        if not all(sequence in self._members for sequence in sequences):
            return 0
        shares = [self._members[sequence].share for sequence in sequences]
        best, most = 0, _MIN_GAIN
        while any(shares) and limit > 0:
            gain = 1 + sum(_expected(share, limit) for share in shares) / len(shares)
            if gain / cost(limit) > most:
                best, most = limit, gain / cost(limit)
            limit //= 2
        return best

    def draft(self, sequence: Sequence, limit: int) -> list[int]:
        member = self._members.get(sequence)
        if member is None or limit < 1 or len(sequence.output_tokens) < _MIN_OUTPUT:
            return []
        return member.group.draft(sequence.output_tokens, limit)

    def learn(self, sequence: Sequence, drawn: list[int]) -> None:
        """`drawn` comes next: what is a draft of it worth?"""
        member = self._members.get(sequence)
        if member is None or len(sequence.output_tokens) < _MIN_OUTPUT:
            return
        num_true = num_equal(self.draft(sequence, len(drawn)), drawn)
        member.share = 1 - (1 - member.share) * (1 - _NEWEST) ** num_true
        if num_true < len(drawn):
            member.share *= 1 - _NEWEST


def can_draft(sequence: Sequence) -> bool:
    """What a grammar or a penalty allows at a place depends on the draws before it."""
    options = sequence.gconfig
    return (
        sequence.grammar is None and not options.frequency_penalty and not has_rare_options(options)
    )


def num_equal(draft: Iterable[int], drawn: Iterable[int]) -> int:
    """How many leading tokens agree."""
    count = 0
    for guess, token in zip(draft, drawn, strict=False):
        if guess != token:
            break
        count += 1
    return count


def _key(tokens: Iterable[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _BITS | token
    return key


def _expected(share: float, length: int) -> float:
    """Tokens of a draft that come true, each with chance `share` once those before it did."""
    if share >= 1:
        return float(length)
    return share * (1 - share**length) / (1 - share)


def _match(text: _Text, place: int, recent: list[int]) -> int:
    """How many tokens before `place` equal the end of `recent`."""
    tokens, length = text.tokens, _MATCH
    most = min(place, len(recent))
    while length < most and tokens[place - 1 - length] == recent[-1 - length]:
        length += 1
    return length
