"""The scheduler's slot table on the device, updated row by row before each launch.

The host has the sequence of a slot, its pages and its options; only the device has the newest
token. A slot is uploaded when it has a new sequence, its page table when it has grown, the tokens
that a grammar allows before every draw. The last slot is scratch, for padding rows of a batch.

Shapes: S slots (the last is scratch), P pages per slot, C context, B words of a bit mask of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from areal.engine.native.cuda.sampler import DeviceSampling
from areal.engine.native.sampler import MAX_STOP_IDS

if TYPE_CHECKING:
    from areal.engine.native.scheduler import SlotTable

_MAX_INT32 = 2**31 - 1


class DeviceSlots:
    def __init__(
        self, table: SlotTable, *, context: int, vocab_size: int, device: torch.device
    ) -> None:
        num_slots, max_pages = table.pages.shape
        self.device = device
        self.scratch = num_slots
        self._table = table
        self._generation = np.zeros(num_slots, np.int64)  # as uploaded
        self._num_pages = np.zeros(num_slots, np.int64)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((num_slots + 1, *shape), dtype=dtype, device=device)

        self.page_table_SP = zeros(max_pages)
        self.last_token_S = zeros()
        self.num_tokens_S = zeros().fill_(1)
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
            allowed_SB=zeros(-(-vocab_size // 32)),
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
        columns = {
            self.num_tokens_S: table.num_tokens,
            options.num_output_S: table.num_output,
            options.min_output_S: table.min_output,
            options.top_k_S: np.minimum(table.top_k, _MAX_INT32),
            options.greedy_S: table.greedy,
            options.constrained_S: table.constrained,
        }
        numbers = self.upload(np.stack([x[slots] for x in columns.values()]).astype(np.int32))
        for target, source in zip(columns, numbers, strict=True):
            target[index] = source
        columns = {
            options.temperature_S: table.temperature,
            options.top_p_S: table.top_p,
            options.frequency_penalty_S: table.frequency_penalty,
        }
        numbers = self.upload(np.stack([x[slots] for x in columns.values()]).astype(np.float32))
        for target, source in zip(columns, numbers, strict=True):
            target[index] = source
        options.seed_S[index] = self.upload(table.seed[slots].view(np.int64))
        options.stop_ids_SM[index] = self.upload(self._stop_ids(slots))
        self._upload_history(slots)
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
        """Outputs of preempted sequences from before, for those with a frequency penalty."""
        for slot in slots[self._table.frequency_penalty[slots] != 0].tolist():
            output = self._table.sequences[slot].output_tokens
            if output:
                history = self.upload(np.array(output, np.int32))
                self.sampling.history_SC[slot, : len(output)] = history

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
