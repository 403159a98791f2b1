"""What goes into the native engine, what comes out, and the state of one generation between.

`GenRequest` in, `Finished` out; a `Sequence` is the life of one request inside the engine. Its
tokens are the prompt followed by the output. The prompt's keys and values are computed by a
`Prefix` (kv_cache.py), once for all samples of a group; the sequence computes those of its output.

Invariant: `output_tokens`, `output_logprobs` and `output_versions` always have one length, and
survive preemption and weight updates: only cache pages are ever given back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal.api.config.generation import GenerationHyperparameters
from areal.api.io_struct import StopReason

if TYPE_CHECKING:
    from areal.engine.native.kv_cache import Prefix
    from areal.engine.native.stop_strings import StopWatch


@dataclass(slots=True)
class GenRequest:
    """One sample to generate. A group of n samples is n requests with the same `input_ids`."""

    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    progress_tokens: int = 0  # `Progress` is wanted each time there are so many new ones; 0: never
    so_far: Progress | None = None  # the output begins with these: another engine has drawn them
    stop_watch: StopWatch | None = None  # of `gconfig.stop`, when it holds any


@dataclass(slots=True)
class Progress:
    """Tokens of a request that has not ended with them."""

    rid: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(slots=True)
class Finished:
    """The output of one request; an aborted one carries the tokens it had."""

    rid: str
    output_tokens: list[int]
    output_logprobs: list[float]  # under the sampling distribution, see sampler.py
    output_versions: list[int]  # version of the weights that sampled each token
    stop_reason: StopReason
    first_token_time: float = 0.0  # time.monotonic() of the first token; 0.0 when there is none


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way from the waiting queue to `Finished`."""

    rid: str
    prompt: tuple[int, ...]
    gconfig: GenerationHyperparameters
    seed: int  # of the counter-based draw; fixed for the life of the request
    stop_ids: frozenset[int]
    max_output: int  # output tokens at which generation ends by length
    progress_tokens: int = 0
    num_told: int = 0  # leading output tokens that somebody was told, or has drawn
    stop_watch: StopWatch | None = None
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    first_token_time: float = 0.0  # time.monotonic(), of the first token sampled here

    # Held only while running; `None`, empty and 0 while waiting.
    slot: int | None = None  # row of the scheduler's slot table
    prefix: Prefix | None = None  # until it is computed and its last partial page copied to ours
    pages: list[int] = field(default_factory=list)  # shared prompt pages, then our own
    num_cached: int = 0  # while filling: leading tokens whose keys and values are in `pages`
    has_ended: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output_tokens)

    def token_slice(self, start: int, end: int) -> list[int]:
        """Output tokens at positions `start` to `end`; those of the prompt are the prefix's."""
        offset = len(self.prompt)
        return self.output_tokens[start - offset : end - offset]

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
        self.output_tokens += tokens[:count]
        self.output_logprobs += logprobs[:count]
        self.output_versions += [version] * count
        return count, reason

    def progress(self) -> Progress | None:
        """What has not been told yet, when there is enough of it."""
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

    def finish(self, stop_reason: StopReason) -> Finished:
        self.has_ended = True
        return Finished(
            rid=self.rid,
            output_tokens=self.output_tokens,
            output_logprobs=self.output_logprobs,
            output_versions=self.output_versions,
            stop_reason=stop_reason,
            first_token_time=self.first_token_time,
        )
