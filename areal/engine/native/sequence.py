"""The life of one request inside the native engine: its input, state, stop strings and output.

A stop string ends generation, but the engine sees tokens. A `StopWatch` belongs to one request: it
is fed the drawn tokens, decodes the last few when a stop string may have been completed, and
returns the token that did. Strings may span tokens and tokens parts of characters; special tokens
count with their text. `visible_text` cuts the text before the string.

`GenRequest` in, `Finished` out; a `Sequence` is the state between. Its tokens are the prompt
followed by the output. The prompt's keys and values are computed by a `Prefix` (kv_cache.py), once
for all samples of a group; the sequence computes those of its output.

Invariant: `output_tokens`, `output_logprobs` and `output_versions` have one length, and survive
preemption and weight updates: only cache pages are ever freed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import Grammar, StopReason
from areal.engine.native.kv_cache import StateSpan
from areal.openai.text_stream import token_text

if TYPE_CHECKING:
    import numpy as np

    from areal.engine.native.grammar import GrammarState
    from areal.engine.native.kv_cache import Prefix
    from areal.models.vision.prompt_images import PromptImages


_UNFINISHED = "\ufffd"  # in the text of a token that ends within a character


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
        # A token has at least one byte of text, so a stop string spans at most this many.
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
        """Whether it may contain the last letter of a stop string; most tokens are skipped so."""
        known = self._may_complete.get(token)
        if known is None:
            letters = set(token_text(self._tokenizer, token))
            # Some tokenizers emit white space only between tokens.
            known = _UNFINISHED in letters or not self._last_letters.isdisjoint(letters)
            known = known or any(letter.isspace() for letter in self._last_letters)
            self._may_complete[token] = known
        return known

    def _is_complete(self) -> bool:
        text = self._tokenizer.decode(
            list(self._tail), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self._stops)


@dataclass(slots=True)
class GenRequest:
    """One sample to generate. A group of n samples is n requests with the same `input_ids`."""

    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    progress_tokens: int = 0  # report `Progress` every so many new tokens; 0: never
    so_far: Progress | None = None  # start of the output, drawn by another engine
    grammar: Grammar | None = None  # of the output
    return_routed_experts: bool = False
    image_data: list[str] = field(default_factory=list)  # base64 or data: URLs, in prompt order
    # Requests of one group differ in rid and seed only, and are sent and answered together.
    group: str = ""
    # Made from the above by `ModelText.prepare`, for this request alone.
    stop_watch: StopWatch | None = None  # for `gconfig.stop`, if not empty
    grammar_state: GrammarState | None = None  # for `grammar`
    images: PromptImages | None = None  # for `image_data`; `input_ids` are expanded then


@dataclass(slots=True)
class Progress:
    """New tokens of a request that has not ended."""

    rid: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]

    @property
    def is_broken(self) -> bool:
        """Not data: weights or logits are broken. The refusal at the end says so."""
        return not all(map(math.isfinite, self.logprobs))


@dataclass(slots=True)
class Finished:
    """The output of one request; if aborted, the tokens so far."""

    rid: str
    output_tokens: list[int]
    output_logprobs: list[float]  # under the sampling distribution, see sampler.py
    output_versions: list[int]  # version of the weights that sampled each token
    stop_reason: StopReason
    first_token_time: float = 0.0  # time.monotonic() of the first token; 0.0 when there is none
    fault: str = ""  # why the request, rather than its output, is at its end
    cached_tokens: int = 0  # of the prompt, found in the cache when it was first needed
    # If asked for, unless aborted: as in ModelResponse.
    routed_experts: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from the waiting queue to `Finished`."""

    rid: str
    prompt: tuple[int, ...]
    gconfig: GenerationHyperparameters
    seed: int  # of the counter-based draw; fixed for the life of the request
    stop_ids: frozenset[int]
    max_output: int  # output tokens at which generation ends by length
    images: PromptImages | None = None
    adapter: int = 0  # its number (adapters.py)
    pinned_version: int | None = None  # of its tokens, whatever is live; None: the live one
    progress_tokens: int = 0
    return_routed_experts: bool = False
    num_told: int = 0  # leading output tokens already reported, or drawn elsewhere
    stop_watch: StopWatch | None = None
    grammar: GrammarState | None = None  # has accepted all output tokens
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    first_token_time: float = 0.0  # time.monotonic(), of the first token sampled here
    cached_tokens: int | None = None  # see Finished; None before it first runs

    # Held only while running; `None`, empty and 0 while waiting.
    slot: int | None = None  # row of the scheduler's slot table
    prefix: Prefix | None = None  # until it is computed and its last partial page copied to ours
    pages: list[int] = field(default_factory=list)  # shared prompt pages, then our own
    num_cached: int = 0  # while filling: leading tokens whose keys and values are in `pages`
    cache_age: int = -1  # PrefixTable.num_updates when its prompt was in `pages`
    has_ended: bool = False
    # Of a model with recurrent layers; see state_cache.py.
    state: int | None = None
    mark: int | None = None  # at the last border of a page after its prompt

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output_tokens)

    @property
    def prompt_key(self) -> tuple[int, ...]:
        """What its prompt is found by: the tokens, and the images they stand for."""
        return self.prompt if self.images is None else self.images.key

    def token_slice(self, start: int, end: int) -> list[int]:
        """Output tokens at positions `start` to `end`; those of the prompt are the prefix's."""
        offset = len(self.prompt)
        return self.output_tokens[start - offset : end - offset]

    def state_span(self, start: int, end: int, page_size: int) -> StateSpan:
        """The states of output tokens at positions `start` to `end`, computed again."""
        if self.state is None or self.mark is None:
            return StateSpan()
        border = end // page_size * page_size
        marks = ((border - start, self.mark),) if border > start else ()
        return StateSpan(self.state, self.state, marks)

    def take(
        self, tokens: list[int], logprobs: list[float], version: int, now: float
    ) -> tuple[int, StopReason | None]:
        """Add tokens the model drew, up to the one that ends the output.

        Returns how many were taken, and why the output ends with them, if it does.
        """
        if not self.first_token_time:
            self.first_token_time = now
        count, reason = len(tokens), None
        room = self.max_output - len(self.output_tokens)
        if count >= room:
            count, reason = room, "length"
        if not self.stop_ids.isdisjoint(tokens):
            stop = next(i for i, token in enumerate(tokens) if token in self.stop_ids)
            if stop < count:
                count, reason = stop + 1, "stop"
        if self.stop_watch is not None:
            stop = self.stop_watch.feed(tokens[:count])
            if stop is not None:
                count, reason = stop + 1, "stop"
        if self.grammar is not None and reason is None:
            self.grammar.accept(tokens)
        self.output_tokens += tokens[:count]
        self.output_logprobs += logprobs[:count]
        own = version if self.pinned_version is None else self.pinned_version
        self.output_versions += [own] * count
        return count, reason

    def go_on_from(self, so_far: Progress) -> None:
        """Treat it like a preempted sequence: its cache is recomputed, its draws continue."""
        if self.stop_watch is not None:
            self.stop_watch.feed(so_far.tokens)
        if self.grammar is not None:
            self.grammar.accept(so_far.tokens)
            if self.grammar.fault:
                raise ValueError(f"so_far: {self.grammar.fault}")
        self.output_tokens = list(so_far.tokens)
        self.output_logprobs = list(so_far.logprobs)
        self.output_versions = list(so_far.versions)
        self.num_told = len(so_far.tokens)

    def progress(self) -> Progress | None:
        """Tokens not reported yet, if there are enough of them."""
        start, end = self.num_told, len(self.output_tokens)
        if not self.progress_tokens or end - start < self.progress_tokens:
            return None
        self.num_told = end
        return Progress(
            self.rid,
            self.output_tokens[start:],
            self.output_logprobs[start:],
            self.output_versions[start:],
        )

    def allowed(self, vocab_size: int) -> np.ndarray | None:
        """Bits of the tokens its grammar allows next; None where nothing can be drawn."""
        assert self.grammar is not None, "only outputs under a grammar are constrained"
        may_end = len(self.output_tokens) >= self.gconfig.min_new_tokens
        return self.grammar.allowed(vocab_size, self.stop_ids, may_end=may_end)

    def finish(self, stop_reason: StopReason, routed_experts: np.ndarray | None = None) -> Finished:
        self.has_ended = True
        return Finished(
            rid=self.rid,
            output_tokens=self.output_tokens,
            output_logprobs=self.output_logprobs,
            output_versions=self.output_versions,
            stop_reason=stop_reason,
            first_token_time=self.first_token_time,
            fault="" if self.grammar is None else self.grammar.fault,
            cached_tokens=self.cached_tokens or 0,
            routed_experts=routed_experts,
        )
