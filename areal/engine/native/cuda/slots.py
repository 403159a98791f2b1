"""The scheduler's slot table on the device, updated row by row before each launch.

The host has the sequence of a slot, its pages and its options; only the device has the newest
token. A slot is uploaded when it has a new sequence, its page table when it has grown, the tokens
that a grammar allows before every draw. The last slot is scratch, for padding rows of a batch.

Shapes: S slots (the last is scratch), P pages per slot, C context, B words of a bit mask of tokens
(or slots with drafts), L drafted tokens of each, N tokens with a bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from areal.engine.native.cuda.adapters import DeviceAdapters
from areal.engine.native.cuda.sampler import DeviceSampling
from areal.engine.native.sampler import MAX_BIASED, MAX_STOP_IDS

if TYPE_CHECKING:
    from areal.engine.native.scheduler import SlotTable

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SlotRows:
    """What a decode step reads, a row per slot."""

    page_table_SP: torch.Tensor
    last_token_S: torch.Tensor
    num_tokens_S: torch.Tensor
    rotary_delta_S: torch.Tensor  # rotary position minus index of a token of the output
    state_S: torch.Tensor  # of a model with recurrent layers
    mark_S: torch.Tensor
    adapter_S: torch.Tensor  # its place (adapters.py)
    sampling: DeviceSampling


class DeviceSlots:
    def __init__(
        self,
        table: SlotTable,
        adapters: DeviceAdapters,
        *,
        context: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        num_slots, max_pages = table.pages.shape
        self.device = device
        self._adapters = adapters
        self.scratch = num_slots
        self._table = table
        self._generation = np.zeros(num_slots, np.int64)  # as uploaded
        self._num_pages = np.zeros(num_slots, np.int64)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((num_slots + 1, *shape), dtype=dtype, device=device)

        num_words = -(-vocab_size // 32)
        self.page_table_SP = zeros(max_pages)
        self.last_token_S = zeros()
        self.num_tokens_S = zeros().fill_(1)
        self.rotary_delta_S = zeros()
        self.state_S, self.mark_S = zeros(), zeros()
        self.adapter_S = zeros()
        self.sampling = DeviceSampling(
            temperature_S=zeros(dtype=torch.float32).fill_(1.0),
            top_k_S=zeros().fill_(_MAX_INT32),
            top_p_S=zeros(dtype=torch.float32).fill_(1.0),
            greedy_S=zeros(),
            seed_S=zeros(dtype=torch.int64),
            num_output_S=zeros(),
            min_output_S=zeros(),
            frequency_penalty_S=zeros(dtype=torch.float32),
            stop_ids_SM=zeros(MAX_STOP_IDS).fill_(-1),
            history_SC=zeros(context),
            constrained_S=zeros(),
            allowed_SB=zeros(num_words),
            adjusted_S=zeros(),
            presence_penalty_S=zeros(dtype=torch.float32),
            repetition_penalty_S=zeros(dtype=torch.float32).fill_(1.0),
            min_p_S=zeros(dtype=torch.float32),
            biased_SN=zeros(MAX_BIASED).fill_(-1),
            bias_SN=zeros(MAX_BIASED, dtype=torch.float32),
            drawn_SB=zeros(num_words),
            prompt_SB=zeros(num_words),
        )

    def update(self, slots: np.ndarray) -> None:
        """Upload changes of `slots` only."""
        table = self._table
        new = slots[self._generation[slots] != table.generation[slots]]
        if new.size:
            self._fill(new)
        grown = slots[self._num_pages[slots] < table.num_pages[slots]]
        if grown.size:
            self._upload_pages(grown)
        constrained = slots[table.constrained[slots]]
        if constrained.size:
            masks = self.upload(np.stack([table.allowed[slot] for slot in constrained.tolist()]))
            self.sampling.allowed_SB[self.upload(constrained)] = masks

    @property
    def rows(self) -> SlotRows:
        return SlotRows(
            self.page_table_SP,
            self.last_token_S,
            self.num_tokens_S,
            self.rotary_delta_S,
            self.state_S,
            self.mark_S,
            self.adapter_S,
            self.sampling,
        )

    def after_drafts(self, slot_B: torch.Tensor, drafts_BL: torch.Tensor) -> SlotRows:
        """B * (L + 1) rows: a slot's newest token, then the tokens drafted after it, each as if it
        were the newest of a slot. Only for draws that do not depend on earlier ones (drafts.py)."""
        num_slots, length = drafts_BL.shape
        options, slot_R = self.sampling, slot_B.long().repeat_interleave(length + 1)
        offset_R = torch.arange(length + 1, dtype=torch.int32, device=self.device).repeat(num_slots)
        newest_B1 = self.last_token_S[slot_B.long(), None]
        none_R = torch.zeros_like(offset_R)
        per_row = {
            name: getattr(options, name)[slot_R]
            for name in (
                *("temperature_S", "top_k_S", "top_p_S", "greedy_S", "seed_S", "min_output_S"),
                "stop_ids_SM",
            )
        }
        sampling = dataclasses.replace(
            options,
            **per_row,
            num_output_S=options.num_output_S[slot_R] + offset_R,
            frequency_penalty_S=none_R.float(),
            constrained_S=none_R,
            adjusted_S=none_R,
        )
        return SlotRows(
            self.page_table_SP[slot_R],
            torch.cat([newest_B1, drafts_BL.clamp(min=0)], dim=1).flatten(),
            self.num_tokens_S[slot_R] + offset_R,
            self.rotary_delta_S[slot_R],
            self.state_S[slot_R],
            self.mark_S[slot_R],
            self.adapter_S[slot_R],
            sampling,
        )

    def advance(self, slot_B: torch.Tensor, tokens_BQ: torch.Tensor, count_B: torch.Tensor) -> None:
        """Append the first `count` tokens to each slot; not to the scratch slot."""
        slot_B = slot_B.long()
        is_live_B = slot_B < self.scratch
        newest_B = tokens_BQ.gather(1, count_B[:, None].long() - 1)[:, 0]
        self.last_token_S[slot_B] = torch.where(is_live_B, newest_B, 0)
        added_B = torch.where(is_live_B, count_B, 0)
        self.num_tokens_S.index_add_(0, slot_B, added_B)
        self.sampling.num_output_S.index_add_(0, slot_B, added_B)

    def shared_prompts(self, slots: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
        """The last page of each that may be shared, which stands for all tokens up to its end, and
        the number of these."""
        table = self._table
        last = np.maximum(table.num_shared[slots] - 1, 0)
        return table.pages[slots, last], table.num_shared[slots] * page_size

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Asynchronous: the allocator keeps pinned memory until the copy is done."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _fill(self, slots: np.ndarray) -> None:
        table, options = self._table, self.sampling
        index = self.upload(slots)
        integers = {
            self.num_tokens_S: table.num_tokens,
            self.rotary_delta_S: table.rotary_delta,
            self.state_S: table.state,
            self.mark_S: table.mark,
            options.num_output_S: table.num_output,
            options.min_output_S: table.min_output,
            options.top_k_S: np.minimum(table.top_k, _MAX_INT32),
            options.greedy_S: table.greedy,
            options.constrained_S: table.constrained,
            options.adjusted_S: table.adjusted,
        }
        floats = {
            options.temperature_S: table.temperature,
            options.top_p_S: table.top_p,
            options.frequency_penalty_S: table.frequency_penalty,
        }
        for columns, dtype in ((integers, np.int32), (floats, np.float32)):
            numbers = self.upload(np.stack([x[slots] for x in columns.values()]).astype(dtype))
            for target, source in zip(columns, numbers, strict=True):
                target[index] = source
        self.adapter_S[index] = self.upload(self._adapters.places_of(table.adapter[slots]))
        options.seed_S[index] = self.upload(table.seed[slots].view(np.int64))
        options.stop_ids_SM[index] = self.upload(self._stop_ids(slots))
        self._upload_history(slots)
        for slot in slots[table.adjusted[slots]].tolist():
            self._upload_rare(slot)
        self.page_table_SP[index] = 0
        self._num_pages[slots] = 0
        self._generation[slots] = table.generation[slots]

    def _stop_ids(self, slots: np.ndarray) -> np.ndarray:
        """Stop tokens of requests with `min_new_tokens`, which are banned at first."""
        ids = np.full((len(slots), MAX_STOP_IDS), -1, np.int32)
        for row in np.flatnonzero(self._table.min_output[slots]).tolist():
            stop_ids = sorted(self._table.sequences[slots[row]].stop_ids)
            ids[row, : len(stop_ids)] = stop_ids
        return ids

    def _upload_history(self, slots: np.ndarray) -> None:
        """Outputs of preempted sequences from before, for those with a penalty."""
        table = self._table
        is_read = (table.frequency_penalty[slots] != 0) | table.adjusted[slots]
        for slot in slots[is_read].tolist():
            output = self._table.sequences[slot].output_tokens
            if output:
                history = self.upload(np.array(output, np.int32))
                self.sampling.history_SC[slot, : len(output)] = history

    def _upload_rare(self, slot: int) -> None:
        sequence, options = self._table.sequences[slot], self.sampling
        assert sequence is not None
        gconfig = sequence.gconfig
        options.presence_penalty_S[slot] = gconfig.presence_penalty
        options.repetition_penalty_S[slot] = gconfig.repetition_penalty
        options.min_p_S[slot] = gconfig.min_p
        tokens = np.full(MAX_BIASED, -1, np.int32)
        tokens[: len(gconfig.logit_bias)] = [int(token) for token in gconfig.logit_bias]
        bias = np.zeros(MAX_BIASED, np.float32)
        bias[: len(gconfig.logit_bias)] = list(gconfig.logit_bias.values())
        options.biased_SN[slot] = self.upload(tokens)
        options.bias_SN[slot] = self.upload(bias)
        num_words = options.drawn_SB.shape[1]
        options.drawn_SB[slot] = self.upload(_bits(sequence.output_tokens, num_words))
        options.prompt_SB[slot] = self.upload(_bits(sequence.prompt, num_words))

    def _upload_pages(self, slots: np.ndarray) -> None:
        first, end = self._num_pages[slots], self._table.num_pages[slots]
        counts = end - first
        row = np.repeat(slots, counts)
        starts = np.cumsum(counts) - counts
        column = np.arange(len(row)) - np.repeat(starts - first, counts)
        row_D, column_D, page_D = self.upload(
            np.stack([row, column, self._table.pages[row, column]])
        )
        self.page_table_SP[row_D, column_D] = page_D.int()
        self._num_pages[slots] = end


def _bits(tokens: Iterable[int], num_words: int) -> np.ndarray:
    is_in = np.zeros(num_words * 32, bool)
    is_in[list(tokens)] = True
    return np.packbits(is_in, bitorder="little").view(np.int32)
