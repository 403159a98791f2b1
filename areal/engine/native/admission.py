"""Can a request ever run? Checked before it is queued, from the model's and the cache's sizes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from areal.api.io_struct import NO_ROOM
from areal.engine.native.kv_cache import PagePool
from areal.engine.native.sampler import MAX_STOP_IDS, check_bias
from areal.engine.native.sequence import GenRequest
from areal.models.common.args import DecoderArgs

_SHORT = 100  # tokens that Python compares as fast as numpy


@dataclass(frozen=True, slots=True)
class Limits:
    args: DecoderArgs
    pool: PagePool
    eos_ids: frozenset[int]

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence."""
        room = self.pool.num_usable * self.pool.page_size
        return min(self.args.max_position_embeddings, room)

    def check(self, request: GenRequest) -> None:
        """ValueError, naming the field, if it could never run."""
        ids, vocab_size = request.input_ids, self.args.vocab_size
        if request.gconfig.stop and request.stop_watch is None:
            raise ValueError("gconfig.stop holds texts: the request needs a stop_watch for them")
        if request.grammar is not None and request.grammar_state is None:
            raise ValueError("grammar: the request needs a grammar_state for it")
        if not ids:
            raise ValueError("input_ids is empty: a prompt needs at least one token")
        stop_ids = request.gconfig.stop_token_ids
        drawn = request.so_far.tokens if request.so_far is not None else []
        fields = (("input_ids", ids), ("stop_token_ids", stop_ids), ("so_far", drawn))
        for field, tokens in fields:
            if tokens and not _are_below(vocab_size, tokens):
                raise ValueError(
                    f"{field} must lie in [0, {vocab_size}), the model's vocabulary, "
                    f"got {min(tokens)} to {max(tokens)}"
                )
        if request.return_routed_experts and self.args.moe is None:
            raise ValueError("return_routed_experts: this model has no experts; leave it out")
        self._check_images(request)
        check_bias(request.gconfig.logit_bias, vocab_size)
        if request.gconfig.min_new_tokens and len(stop_ids) + len(self.eos_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"min_new_tokens holds off at most {MAX_STOP_IDS} stop tokens, "
                f"got {len(stop_ids)} stop_token_ids"
            )
        self._check_room(request, len(drawn))

    def _check_images(self, request: GenRequest) -> None:
        if request.image_data and request.images is None:
            raise ValueError("image_data: the request needs its images made ready")
        vision = self.args.vision
        if vision is None:
            if request.images is not None:
                raise ValueError("image_data: this model has no vision tower; remove the images")
        elif request.images is None and vision.image_token_id in request.input_ids:
            raise ValueError(
                f"input_ids has image tokens ({vision.image_token_id}), and image_data is empty: "
                "send an image for each, or leave the tokens out"
            )

    def _check_room(self, request: GenRequest, num_drawn: int) -> None:
        limit = self._max_tokens(request)
        if len(request.input_ids) >= limit:
            raise ValueError(
                f"input_ids has {len(request.input_ids)} tokens, which leaves {NO_ROOM}: the limit "
                f"of prompt and output is {limit}, the smallest of gconfig.max_tokens "
                f"({request.gconfig.max_tokens}), the model's context "
                f"({self.args.max_position_embeddings}) and the cache "
                f"({self.pool.num_usable} pages of {self.pool.page_size}: raise num_pages)"
            )
        most = min(request.gconfig.max_new_tokens, limit - len(request.input_ids))
        if num_drawn >= most:
            raise ValueError(
                f"so_far has {num_drawn} tokens, which leaves none to generate of the {most} this "
                "request can have"
            )

    def max_output(self, request: GenRequest) -> int:
        room = self._max_tokens(request) - len(request.input_ids)
        return min(request.gconfig.max_new_tokens, room)

    def _max_tokens(self, request: GenRequest) -> int:
        """Most tokens of prompt and output that one request can hold with the cache to itself."""
        size = self.pool.page_size
        # The prefix's partial page is held once by the prefix and copied once by the sequence.
        cache_pages = self.pool.num_usable - (1 if len(request.input_ids) % size else 0)
        return min(request.gconfig.max_tokens, self.max_context, cache_pages * size)


def _are_below(limit: int, tokens: list[int]) -> bool:
    """Whether all lie in [0, limit). `min` and `max` of a long prompt take ten times as long."""
    if len(tokens) < _SHORT:
        return min(tokens) >= 0 and max(tokens) < limit
    try:
        values = np.frombuffer(struct.pack(f"{len(tokens)}q", *tokens), np.int64)
    except struct.error:  # no integer of 64 bits
        return False
    return bool(values.min() >= 0 and values.max() < limit)
