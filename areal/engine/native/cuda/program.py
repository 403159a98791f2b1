"""The kernel sequences of prefill, decode step and draw, without streams, graphs or waits.

`CudaRunner` captures `step` and launches the rest. Nothing here reads a value back, so everything
can run ahead of the host; all tensors it changes (cache, slots) are allocated once.

Shapes: R rows of a decode step, S slots, C chunks, T prefill rows, P pages, D model dim; B slots
with drafts of L tokens each, which make B * Q rows, Q = L + 1.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from areal.engine.native.cuda.adapters import DeviceAdapters
from areal.engine.native.cuda.decode_attention import (
    Workspace,
    decode_attention,
    rows_attention,
    splits_for,
)
from areal.engine.native.cuda.decoder import (
    FusedDecoder,
    ModuleDecoder,
    Rows,
)
from areal.engine.native.cuda.device import device_of
from areal.engine.native.cuda.latent_attention import (
    decode_latents,
    head_tiles,
    latent_workspace,
    prefill_latents,
)
from areal.engine.native.cuda.mixers import Attend
from areal.engine.native.cuda.paged_cache import PagedCache
from areal.engine.native.cuda.prefill_attention import flashinfer_prefill, prefill_attention
from areal.engine.native.cuda.prompt_attention import prompt_attention
from areal.engine.native.cuda.sampler import DeviceSampling, SamplingWorkspace, sample_rows
from areal.engine.native.cuda.shared_prompts import (
    Heads,
    PromptSpace,
    SharedPrompts,
    share_prompts,
)
from areal.engine.native.cuda.slots import DeviceSlots, SlotRows
from areal.engine.native.cuda.states import DeviceStates
from areal.engine.native.cuda.step_kernels import finish_decode, prepare_decode
from areal.engine.native.runner import joined_sights
from areal.models.common.invariant import row_logprobs
from areal.models.vision.placeholders import never_sampled

if TYPE_CHECKING:
    from areal.engine.native.adapters import AdapterBank
    from areal.engine.native.runner import Chunk
    from areal.engine.native.scheduler import SlotTable
    from areal.models.common.args import DecoderArgs
    from areal.models.common.decoder import Decoder


MAX_DRAFT_ROWS = 64  # up to here a step is bound by reading the weights


class DeviceProgram:
    def __init__(
        self,
        model: Decoder,
        table: SlotTable,
        adapters: AdapterBank,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        batch_invariant: bool,
        num_states: int | None = None,
    ) -> None:
        """`max_rows`: most rows of a decode step. `num_states`: of a model with recurrent layers.

        `batch_invariant`: one kernel per weight and no split of a row's attention, so that a row's
        bits do not depend on other rows (models/common/invariant.py).
        """
        args, weight = model.args, model.embedding_weight
        self.device = weight.device
        self.cache = PagedCache(model, num_pages=num_pages, page_size=page_size)
        context = min(args.max_position_embeddings, table.pages.shape[1] * page_size)
        decoder = (ModuleDecoder if batch_invariant else FusedDecoder)(model, self.cache)
        projections = decoder.projections if isinstance(decoder, FusedDecoder) else []
        self.adapters = DeviceAdapters(adapters, projections)
        self.slots = DeviceSlots(
            table,
            self.adapters,
            context=context,
            vocab_size=args.vocab_size,
            device=weight.device,
        )
        self._table, self._decoder = table, decoder
        self._states = None if num_states is None else DeviceStates(model, num_states)
        if self._states is not None:
            self.slots.state_S[-1] = self.slots.mark_S[-1] = self._states.scratch
        self._args = args
        # A drawn image token would stand for an image that is not there. None: no vision tower.
        never = never_sampled(args.vision, args.vocab_size)
        self._never = torch.tensor(never, device=weight.device) if never else None
        self._invariant = batch_invariant
        self._attention_space = _attention_space(args, max(max_rows, MAX_DRAFT_ROWS), self.device)
        heads = Heads(args.n_heads, args.n_kv_heads, args.head_dim, weight.dtype)
        self._prompt_space, self._flashinfer = None, None
        if not batch_invariant and args.latent is None:
            if heads.can_share(device_of(weight.device)):
                self._prompt_space = PromptSpace.make(max_rows, heads, weight.device)
            keys, _ = self.cache.layer(args.attention_layers[0])
            self._flashinfer = flashinfer_prefill(keys, args.n_heads, args.score_scale)
        self._step_count = torch.zeros(1, dtype=torch.int32, device=weight.device)

    def new_outputs(self, num_steps: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities [K, R] for `step` and `draw` to write."""
        shape = (num_steps, num_rows)
        return (
            torch.zeros(shape, dtype=torch.int32, device=self.device),
            torch.zeros(shape, dtype=torch.float32, device=self.device),
        )

    def update(self, slots: np.ndarray) -> bool:
        """Upload what has changed of `slots`; whether an adapter changes one of them."""
        self.adapters.sync()
        self.slots.update(slots)
        return self.adapters.are_among(self._table.adapter[slots])

    def share_prompts(self, slots: np.ndarray, num_rows: int) -> np.ndarray | None:
        """Which rows of a step read their prompts together; None if it is not worthwhile."""
        if self._prompt_space is None:
            return None
        last_page, prompt = self.slots.shared_prompts(slots, self.cache.page_size)
        return share_prompts(last_page, prompt, num_rows, self._prompt_space)

    def new_shared(self, num_rows: int) -> SharedPrompts:
        """Buffers for `step`; the plan is copied into their `flat`."""
        assert self._prompt_space is not None, "where nothing is shared, no step asks for it"
        return SharedPrompts.make(num_rows, self._prompt_space)

    def begin(self) -> None:
        """Reset the output row: the next `step` or `draw` writes row 0, the one after it row 1."""
        self._step_count.zero_()

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        """Hidden states [C, D] of the chunks' last tokens."""
        rows, attend, last = self._lay_out(chunks)
        return self._decoder.forward(rows, attend)[last]

    def step(
        self,
        slot_R: torch.Tensor,
        tokens_KR: torch.Tensor,
        logprobs_KR: torch.Tensor,
        shared: SharedPrompts | None = None,
        *,
        adapted: bool,
    ) -> None:
        """One decode step, from the slots' newest tokens to their next ones.

        `adapted`: with the adapters of the slots, which have none otherwise."""
        hidden_RD = self._decode(slot_R, self.slots.rows, shared, adapted=adapted)
        self.draw(slot_R, hidden_RD, tokens_KR, logprobs_KR)

    def verify(
        self,
        slot_B: torch.Tensor,
        drafts_BL: torch.Tensor,
        tokens_BQ: torch.Tensor,
        logprobs_BQ: torch.Tensor,
        count_B: torch.Tensor,
        *,
        adapted: bool,
    ) -> None:
        """One step for each slot's newest token and the L drafted ones after it (Q = L + 1).

        A slot's first `count` draws are its next tokens, and it advances by as many. A draft may
        be filled up with -1. What later rows wrote to the cache is written again when it is known.
        """
        slots, (num_slots, length) = self.slots, drafts_BL.shape
        rows = slots.after_drafts(slot_B, drafts_BL)
        row_R = torch.arange(num_slots * (length + 1), dtype=torch.int32, device=self.device)
        hidden_RD = self._decode(row_R, rows, adapted=adapted)
        token_R, logprob_R = self._sample(row_R, hidden_RD, rows.sampling)
        tokens_BQ.copy_(token_R.view(num_slots, -1))
        logprobs_BQ.copy_(logprob_R.view(num_slots, -1))
        is_true_BL = tokens_BQ[:, :-1] == drafts_BL
        torch.add(is_true_BL.int().cumprod(1).sum(1), 1, out=count_B)
        slots.advance(slot_B, tokens_BQ, count_B)

    def draw(
        self,
        slot_R: torch.Tensor,
        hidden_RD: torch.Tensor,
        tokens_KR: torch.Tensor,
        logprobs_KR: torch.Tensor,
    ) -> None:
        """A token for each slot from its newest hidden state; the slots advance by one."""
        slots = self.slots
        token_R, logprob_R = self._sample(slot_R, hidden_RD, slots.sampling)
        finish_decode(
            slot_R, token_R, logprob_R, slots.last_token_S, slots.num_tokens_S,
            slots.sampling.num_output_S, slots.sampling.history_SC, self._step_count,
            tokens_KR, logprobs_KR,
        )  # fmt: skip

    def _decode(
        self,
        slot_R: torch.Tensor,
        slots: SlotRows,
        shared: SharedPrompts | None = None,
        *,
        adapted: bool,
    ) -> torch.Tensor:
        """Hidden states [R, D] of the newest tokens of the rows `slot_R` of `slots`."""
        num_rows = len(slot_R)
        new = torch.empty_like
        rows = Rows(new(slot_R), new(slot_R), new(slot_R))
        prepare_decode(
            slot_R, slots.last_token_S, slots.num_tokens_S, slots.page_table_SP,
            self.cache.page_size, rows.tokens_T, rows.positions_T, rows.write_T,
        )  # fmt: skip
        if self._states is not None:
            rows = replace(rows, recur=self._states.step(slot_R, slots, self.cache.page_size))
        if self._never is not None:  # a prompt with images ends at a smaller position
            rows.positions_T.add_(slots.rotary_delta_S[slot_R.long()])
        if adapted:
            rows = replace(rows, adapters=self.adapters.rows(slots.adapter_S[slot_R.long()]))
        attend = self._decode_attend(slot_R, slots, shared)
        decoder = self._decoder
        forward = decoder.forward
        if isinstance(decoder, FusedDecoder) and decoder.can_run_few(num_rows) and not adapted:
            forward = decoder.forward_few
        return forward(rows, attend)

    def _decode_attend(
        self, slot_R: torch.Tensor, slots: SlotRows, shared: SharedPrompts | None
    ) -> Attend:
        """Attention of the newest tokens of the rows `slot_R` of `slots`."""
        args, space, device = self._args, self._attention_space, device_of(self.device)
        if args.latent is not None:
            num_splits = splits_for(len(slot_R), head_tiles(args.n_heads)[0], device)
            return lambda layer, q_RNX, out_RNL: decode_latents(
                q_RNX, self.cache.latents(layer), slots.page_table_SP, slot_R, slots.num_tokens_S,
                out_RNL, space, num_splits, scale=args.scale,
            )  # fmt: skip
        num_splits = 1 if self._invariant else splits_for(len(slot_R), args.n_kv_heads, device)
        window_of, scale = args.window, args.score_scale

        def attend(layer: int, q_RNH: torch.Tensor, out_RNH: torch.Tensor) -> None:
            caches = (*self.cache.layer(layer), slots.page_table_SP, slot_R)
            scales = self.cache.scales(layer)
            window = window_of(layer)
            together = shared if window is None else None
            if together is not None:
                prompt_attention(q_RNH, *caches, together, scale=scale, scales=scales)
            decode_attention(
                q_RNH, *caches, slots.num_tokens_S, out_RNH, space, num_splits,
                together, window=window, scale=scale, scales=scales,
            )  # fmt: skip

        return attend

    def _sample(
        self, slot_R: torch.Tensor, hidden_RD: torch.Tensor, sampling: DeviceSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities, [R] each."""
        token_R = torch.empty_like(slot_R)
        logprob_R = torch.empty_like(slot_R, dtype=torch.float32)
        logits_RV = self._decoder.logits(hidden_RD)
        if self._never is not None:
            logits_RV.index_fill_(1, self._never, -torch.inf)
        num_rows, vocab_size = logits_RV.shape
        workspace = SamplingWorkspace.allocate(num_rows, vocab_size, self.device)
        sample_rows(logits_RV, slot_R, sampling, token_R, logprob_R, workspace)
        if self._invariant:
            logprob_R = _trainer_logprobs(logits_RV, slot_R, sampling, token_R, logprob_R)
        return token_R, logprob_R

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        source, target = self.slots.upload(np.array([sources, targets]))
        self.cache.copy_pages(source, target)

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        assert self._states is not None, "the engine has states of recurrent layers alone"
        self._states.copy(*self.slots.upload(np.array([sources, targets])))

    def routed_experts(self, pages: list[int], num_tokens: int) -> np.ndarray:
        assert self.cache.experts is not None, "the engine refuses it for a dense model"
        return self.cache.experts.read(pages, num_tokens)

    def _lay_out(self, chunks: list[Chunk]) -> tuple[Rows, Attend, torch.Tensor]:
        """Rows of a prefill, its attention, and the index of each chunk's last row."""
        size = self.cache.page_size
        lengths = np.array([len(chunk.tokens) for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        first_row = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.fromiter(itertools.chain(*(c.tokens for c in chunks)), np.int32, first_row[-1])
        positions = np.arange(first_row[-1]) + np.repeat(starts - first_row[:-1], lengths)
        num_pages = -(-(starts + lengths) // size)
        pages_CP = np.zeros((len(chunks), num_pages.max()), np.int32)
        for row, chunk in enumerate(chunks):
            pages_CP[row, : num_pages[row]] = chunk.pages[: num_pages[row]]
        page_T = pages_CP[np.repeat(np.arange(len(chunks)), lengths), positions // size]
        write = page_T * size + positions % size
        upload = self.slots.upload
        rows_3T = upload(np.stack([tokens, positions, write]).astype(np.int32))
        attend = self._prefill_attend(lengths, starts, pages_CP, rows_3T[1])
        attend = self._with_blocks(attend, positions, lengths, pages_CP, chunks)
        rows = Rows(rows_3T[0], rows_3T[1], rows_3T[2])
        rows = self._with_images(rows, positions, chunks)
        rows = self._with_adapters(rows, np.array([c.adapter for c in chunks]), lengths)
        if self._states is not None:
            spans = [chunk.states for chunk in chunks]
            rows = replace(rows, recur=self._states.prefill(lengths, spans, upload))
        return rows, attend, upload(first_row[1:] - 1)

    def _with_adapters(self, rows: Rows, numbers: np.ndarray, lengths: np.ndarray) -> Rows:
        """`numbers`: of the chunks' adapters."""
        self.adapters.sync()
        if not self.adapters.are_among(numbers):
            return rows
        place_T = self.slots.upload(np.repeat(self.adapters.places_of(numbers), lengths))
        return replace(rows, adapters=self.adapters.rows(place_T))

    def _with_images(self, rows: Rows, positions: np.ndarray, chunks: list[Chunk]) -> Rows:
        """With what the chunks' images change, if there are any."""
        if any(chunk.positions is not None for chunk in chunks):
            rotary_3T, start = np.broadcast_to(positions, (3, len(positions))).copy(), 0
            for chunk in chunks:
                end = start + len(chunk.tokens)
                if chunk.positions is not None:
                    rotary_3T[:, start:end] = chunk.positions
                start = end
            rows = replace(rows, positions_T=self.slots.upload(rotary_3T.astype(np.int32)))
        seen = joined_sights(chunks)
        if seen is None:
            return rows
        return replace(rows, sight=seen[0], sight_rows_I=self.slots.upload(seen[1]))

    def _with_blocks(
        self,
        attend: Attend,
        positions: np.ndarray,
        lengths: np.ndarray,
        pages_CP: np.ndarray,
        chunks: list[Chunk],
    ) -> Attend:
        """`attend`, after which tokens that see all of their image are computed once more."""
        if all(chunk.last_visible is None for chunk in chunks):
            return attend
        last, start = positions.copy(), 0
        for chunk in chunks:
            end = start + len(chunk.tokens)
            if chunk.last_visible is not None:
                last[start:end] = chunk.last_visible
            start = end
        rows = np.flatnonzero(last > positions)
        if not len(rows):
            return attend
        chunk = np.repeat(np.arange(len(chunks)), lengths)
        columns = np.stack([x[rows] for x in (chunk, last, last - positions)]).astype(np.int32)
        upload, args, cache = self.slots.upload, self._args, self.cache
        (chunk_I, last_I, ahead_I), rows_I = upload(columns), upload(rows)
        pages = upload(pages_CP)

        def attend_twice(layer: int, q_TNH: torch.Tensor, out_TNH: torch.Tensor) -> None:
            attend(layer, q_TNH, out_TNH)
            q_INH = q_TNH.index_select(0, rows_I)
            out_INH = torch.empty_like(q_INH)
            rows_attention(
                q_INH, *cache.layer(layer), pages, chunk_I, last_I, out_INH,
                window=args.window(layer), scale=args.score_scale, scales=cache.scales(layer),
                ahead_T=ahead_I,
            )  # fmt: skip
            out_TNH.index_copy_(0, rows_I, out_INH)

        return attend_twice

    def _prefill_attend(
        self,
        lengths: np.ndarray,
        starts: np.ndarray,
        pages_CP: np.ndarray,
        position_T: torch.Tensor,
    ) -> Attend:
        """Attention of chunks of `lengths` rows from the positions `starts` on."""
        cache, upload, flashinfer = self.cache, self.slots.upload, self._flashinfer
        window_of, scale = self._args.window, self._args.score_scale
        pages = upload(pages_CP)
        if self._invariant:
            chunk_T = upload(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
            return lambda layer, q_TNH, out_TNH: rows_attention(
                q_TNH, *cache.layer(layer), pages, chunk_T, position_T, out_TNH,
                window=window_of(layer), scale=scale,
            )  # fmt: skip
        first_row_C1 = upload(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        first_position_C, max_rows = upload(starts.astype(np.int32)), int(lengths.max())
        if self._args.latent is not None:
            latent_scale = self._args.scale
            return lambda layer, q_TNX, out_TNL: prefill_latents(
                q_TNX, cache.latents(layer), pages, first_row_C1, first_position_C, out_TNL,
                max_rows, scale=latent_scale,
            )  # fmt: skip
        if flashinfer is not None:
            flashinfer.plan(lengths, starts, pages_CP)

        def attend(layer: int, q_TNH: torch.Tensor, out_TNH: torch.Tensor) -> None:
            window = window_of(layer)
            if flashinfer is not None and window is None:
                flashinfer.attend(q_TNH, *cache.layer(layer), out_TNH)
                return
            prefill_attention(
                q_TNH, *cache.layer(layer), pages, first_row_C1, first_position_C, out_TNH,
                max_rows, window=window, scale=scale, scales=cache.scales(layer),
            )  # fmt: skip

        return attend


def _attention_space(args: DecoderArgs, max_rows: int, device: torch.device) -> Workspace:
    if args.latent is not None:
        return latent_workspace(max_rows, args.n_heads, args.latent.kv_rank, device)
    return Workspace.make(max_rows, args.n_heads, args.n_kv_heads, args.head_dim, device)


def _trainer_logprobs(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    sampling: DeviceSampling,
    token_R: torch.Tensor,
    logprob_R: torch.Tensor,
) -> torch.Tensor:
    """Recompute log-probabilities in the trainer's arithmetic, for rows without a cut."""
    slot_R = slot_R.long()
    scaled_RV = logits_RV / sampling.temperature_S[slot_R, None]
    exact_R = row_logprobs(scaled_RV, token_R.long())
    is_cut_R = (sampling.top_p_S < 1) | (sampling.top_k_S < logits_RV.shape[1])
    is_cut_R |= (sampling.adjusted_S != 0) & (sampling.min_p_S > 0)
    is_cut_R = (is_cut_R & (sampling.greedy_S == 0))[slot_R]
    return torch.where(is_cut_R, logprob_R, exact_R)
