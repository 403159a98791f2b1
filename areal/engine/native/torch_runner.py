"""The runner for any device: plain torch, one step per launch, results at once.

Invariant (CPU): tokens and log-probabilities of a request are, bit for bit, a function of weights,
prompt, seed and options. No row depends on other rows: matrix products because every forward has
whole tiles of rows (`ForwardRows`), attention because a row's arithmetic has one shape
(`PagedAttention`).

`PagedAttention` is the `attend` back end of prefill and decoding. Every token of a forward is a
row: it writes its key and value into the cache, then attends to the pages of its sequence up to its
own position. The number of pages is rounded up by `bucket_of`, and rows of one bucket are computed
together. So a result does not depend on other rows, on prefill or decoding, or on how a prompt was
split into chunks (a CPU kernel computes each (row, head) alone). The G query heads that share a
key/value head are laid out as G query positions. With a sliding window only the pages within reach
are read.

`ForwardRows` collects the rows of one forward on the host, chunk by chunk (all decoding sequences;
a piece of one prompt); `build` pads them to whole tiles (utils/device.py) with rows that write to
the scratch page.

Shapes: T rows, R sampled rows or rows of one bucket, D model dim, V vocabulary, L layers, N query
heads, K key/value heads, G = N / K, H head dim, P pages, S = P * page_size cached positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from areal.engine.native.drafts import num_equal
from areal.engine.native.expert_cache import ExpertCache
from areal.engine.native.kv_cache import SCRATCH_PAGE, StateSpan
from areal.engine.native.runner import Computed, joined_sights
from areal.engine.native.sampler import sample
from areal.engine.native.state_cache import StateCache, StateRows
from areal.models.common.moe import recorded_experts
from areal.models.vision.placeholders import never_sampled
from areal.models.vision.tower import Images, Sight
from areal.utils.device import CPU_TILE, keep_freed_memory, use_plain_blas, whole_tiles

if TYPE_CHECKING:
    from areal.engine.native.adapters import AdapterBank
    from areal.engine.native.runner import Chunk
    from areal.engine.native.scheduler import SlotTable
    from areal.models.common.args import DeltaArgs
    from areal.models.common.attention import AttentionSpec
    from areal.models.common.decoder import Decoder
    from areal.models.common.delta_rule import DeltaInputs


class TorchRunner:
    steps_per_launch = 1
    launches_ahead = 0
    adapted_weights: frozenset[int] | None = None

    def __init__(
        self,
        model: Decoder,
        table: SlotTable,
        adapters: AdapterBank,
        *,
        num_pages: int,
        page_size: int,
        max_prefill_tokens: int,
        num_states: int | None = None,
    ) -> None:
        weight = model.embedding_weight
        if weight.device.type == "cpu":
            use_plain_blas()
            keep_freed_memory()
        self.max_prefill_tokens = max_prefill_tokens
        self._model = model
        self._device = weight.device
        self._table = table
        self._adapters = adapters
        self._cache = new_cache(model, num_pages=num_pages, page_size=page_size)
        self._states = None if num_states is None else StateCache(model, num_states)
        moe = model.args.moe
        self._experts = moe and ExpertCache(
            moe, num_pages=num_pages, page_size=page_size, device=weight.device
        )
        # A drawn image token would stand for an image that is not there.
        never = never_sampled(model.args.vision, model.args.vocab_size)
        self._never = torch.tensor(never, device=weight.device) if never else None
        self._weight_bytes = sum(p.nbytes for p in model.parameters())

    def look(self, images: Images) -> Sight:
        return self._model.look(images)

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        rows = ForwardRows()
        last = []
        for chunk in chunks:
            positions = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            tokens, pages = np.array(chunk.tokens), np.array(chunk.pages)
            rows.add(tokens, positions, pages, chunk.adapter, chunk.positions, chunk.last_visible)
            last.append(rows.count - 1)
        lengths = [len(chunk.tokens) for chunk in chunks]
        states = [chunk.states for chunk in chunks]
        return self._forward(rows, lengths, states, joined_sights(chunks))[last]

    def decode(self, slots: np.ndarray, num_steps: int) -> Computed:
        assert num_steps == 1, "this runner takes one step at a time"
        first = np.zeros_like(slots)
        rows = self._newest(slots, first, self._table.last_token[slots])
        hidden_TD = self._forward(rows, [1] * len(slots), self._spans(slots))
        return self._draw(slots, hidden_TD[: len(slots)])

    def draft_length(self, num_rows: int) -> int:
        """Drafts take the place of padding rows. None with states: these cannot go back to before
        a draft that did not come true."""
        return 0 if self._states is not None else max(CPU_TILE // num_rows - 1, 0)

    def draft_cost(self, slots: np.ndarray, length: int) -> float:
        """The products of a tile of rows cost the same; attention and draws cost by the row."""
        row_bytes = _GATHER_PASSES * self._cache.token_bytes * self._table.num_tokens[slots].sum()
        row_bytes += len(slots) * _DRAW_PASSES * 8 * self._model.args.vocab_size
        return 1 + length * float(row_bytes) / (self._weight_bytes + float(row_bytes))

    def verify(self, slots: np.ndarray, drafts: list[list[int]]) -> Computed:
        table = self._table
        counts = np.array([1 + len(draft) for draft in drafts])
        first_row = np.cumsum(counts) - counts
        row_slot = np.repeat(slots, counts)
        offset = np.arange(len(row_slot)) - np.repeat(first_row, counts)
        drafted = np.fromiter(itertools.chain(*([0, *draft] for draft in drafts)), np.int64)
        tokens_R = np.where(offset == 0, table.last_token[row_slot], drafted)
        rows = self._newest(row_slot, offset, tokens_R)
        hidden_TD = self._forward(rows, counts.tolist(), self._spans(slots))
        tokens, logprobs = self._sample(row_slot, hidden_TD[: rows.count], offset)
        drawn = Computed([], [])
        for start, draft in zip(first_row.tolist(), drafts, strict=True):
            end = start + 1 + num_equal(draft, tokens[start:])
            drawn.tokens.append(tokens[start:end])
            drawn.logprobs.append(logprobs[start:end])
        table.last_token[slots] = [kept[-1] for kept in drawn.tokens]
        return drawn

    def _newest(self, slots: np.ndarray, offset: np.ndarray, tokens: np.ndarray) -> ForwardRows:
        """A row for each slot: the token `offset` after its last one."""
        table = self._table
        positions = table.num_tokens[slots] - 1 + offset
        width = int(positions.max()) // self._cache.page_size + 1
        rows = ForwardRows()
        rows.add(
            tokens,
            positions,
            table.pages[slots, :width],
            table.adapter[slots],
            positions + table.rotary_delta[slots],
        )
        return rows

    def _spans(self, slots: np.ndarray) -> list[StateSpan]:
        """Of the next token of each slot, which marks a state if it ends a page."""
        if self._states is None:
            return []
        table = self._table
        ends_page = table.num_tokens[slots] % self._cache.page_size == 0
        columns = (table.state[slots], table.mark[slots], ends_page)
        return [
            StateSpan(state, state, ((1, mark),) if ends else ())
            for state, mark, ends in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def draw(self, slots: np.ndarray, hidden: list[torch.Tensor]) -> Computed:
        return self._draw(slots, torch.stack(hidden))

    def _draw(self, slots: np.ndarray, hidden_RD: torch.Tensor) -> Computed:
        tokens, logprobs = self._sample(slots, hidden_RD, np.zeros_like(slots))
        self._table.last_token[slots] = tokens
        return Computed([[token] for token in tokens], [[logprob] for logprob in logprobs])

    def _sample(
        self, slots: np.ndarray, hidden_RD: torch.Tensor, offset: np.ndarray
    ) -> tuple[list[int], list[float]]:
        """The draw `offset` after the next one of each slot."""
        num_padding = whole_tiles(len(slots)) - len(slots)
        logits_RV = self._model.logits(F.pad(hidden_RD, (0, 0, 0, num_padding)))[: len(slots)]
        if self._never is not None:
            logits_RV.index_fill_(1, self._never, -torch.inf)
        return sample(logits_RV, self._table.sampling_options(slots, offset))

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        source, target = torch.tensor([sources, targets], device=self._device)
        self._cache.copy_pages(source, target)
        if self._experts is not None:
            self._experts.copy_pages(source, target)

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        assert self._states is not None, "the engine has states of recurrent layers alone"
        self._states.copy(*torch.tensor([sources, targets], device=self._device))

    def routed_experts(self, pages: list[int], num_tokens: int) -> np.ndarray:
        assert self._experts is not None, "the engine refuses it for a dense model"
        return self._experts.read(pages, num_tokens)

    def load(self, model_weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in model_weights:
            self._model.load_hf_tensor(name, tensor)

    def _forward(
        self,
        rows: ForwardRows,
        lengths: list[int],
        spans: list[StateSpan],
        seen: tuple[Sight, np.ndarray] | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, D] of all rows; writes their keys and values to the cache.

        `lengths`: rows of each sequence, with its states in `spans` if the model has such. `seen`:
        embeddings that replace those of some rows.
        """
        tokens_T, positions_T, last_T, pages_TP, adapters_T, rotary = rows.build()
        self._adapters.begin(adapters_T)
        attend = PagedAttention(self._cache, positions_T, pages_TP, last_T)
        if self._states is not None:
            sizes = self._model.args.delta_args
            attend.states = self._states, StateRows.of(lengths, spans, sizes, self._device)
        inputs = [torch.from_numpy(x).to(self._device) for x in (tokens_T, rotary)]
        sight, rows_I = seen or (None, None)
        if rows_I is not None:
            rows_I = torch.from_numpy(rows_I).to(self._device)
        if self._experts is None:
            return self._model(*inputs, attend, sight, rows_I)
        with recorded_experts(self._model) as chosen:
            hidden_TD = self._model(*inputs, attend, sight, rows_I)
        self._experts.write(attend.write_T, torch.stack(chosen, dim=1))
        return hidden_TD


# How often a step moves the cache it gathers, and a row's logits in float64, through memory.
_GATHER_PASSES, _DRAW_PASSES = 3, 8
# Elements of keys (and of values) gathered at once; long prompts are split into chunks of rows.
_MAX_GATHERED_ELEMENTS = 2**23


@dataclass(frozen=True, slots=True)
class KVCache:
    """Of all pages in all layers with attention. Masked positions are multiplied by 0, so what is
    not written yet must be finite."""

    keys: torch.Tensor  # [L, num_pages, page_size, K, H]
    values: torch.Tensor
    row_of: Mapping[int, int]  # layer of the model -> index in dimension 0

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def token_bytes(self) -> int:
        num_layers, _, _, *heads = self.keys.shape
        return 2 * num_layers * math.prod(heads) * self.keys.itemsize

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for cache in (self.keys, self.values):
            cache.index_copy_(1, target, cache.index_select(1, source))


def new_cache(model: Decoder, *, num_pages: int, page_size: int) -> KVCache:
    args = model.args
    row_of = {layer: row for row, layer in enumerate(args.attention_layers)}
    shape = (len(row_of), num_pages, page_size, args.n_kv_heads, args.head_dim)
    keys, values = (model.embedding_weight.new_zeros(shape) for _ in range(2))
    return KVCache(keys, values, row_of)


@dataclass(slots=True)
class _Bucket:
    """Rows with the same rounded number of pages."""

    rows: torch.Tensor | slice  # [R] int64, or all
    pages: torch.Tensor  # [R * P] int64, from the first visible one
    bias: torch.Tensor  # [R, 1, 1, S], 0 where visible to the row, -inf elsewhere


class PagedAttention:
    """One forward's `attend`. Built on the host from each row's position and page table."""

    def __init__(
        self,
        cache: KVCache,
        positions_T: np.ndarray,
        pages_TP: np.ndarray,
        last_T: np.ndarray | None = None,
    ) -> None:
        """`pages_TP` int64: pages from position 0 on; entries past a row's position are unused.
        `last_T`: the last position each row sees, if not its own."""
        self._cache = cache
        self._device = cache.keys.device
        self._positions_T, self._pages_TP = positions_T, pages_TP
        self._last_T = positions_T if last_T is None else last_T
        size = cache.page_size
        written = np.take_along_axis(pages_TP, positions_T[:, None] // size, axis=1)[:, 0]
        # Flat cache position of each row's key and value.
        self.write_T = self._upload(written * size + positions_T % size)
        self._buckets_of: dict[int | None, list[_Bucket]] = {}  # by window
        self.states: tuple[StateCache, StateRows] | None = None  # of a model with recurrent layers

    def recur(self, layer: int, inputs: DeltaInputs, sizes: DeltaArgs) -> torch.Tensor:
        assert self.states is not None, "the runner sets them for such a model"
        cache, rows = self.states
        return cache.recur(layer, inputs, sizes, rows)

    def __call__(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        row = self._cache.row_of[spec.layer]
        keys, values = self._cache.keys[row], self._cache.values[row]
        keys.flatten(0, 1).index_copy_(0, self.write_T, k_TKH)
        values.flatten(0, 1).index_copy_(0, self.write_T, v_TKH)
        if spec.window not in self._buckets_of:
            self._buckets_of[spec.window] = self._make_buckets(spec.window)
        buckets = self._buckets_of[spec.window]
        if len(buckets) == 1:
            return self._attend_bucket(buckets[0], q_TNH, keys, values, spec.scale)
        out_TNH = torch.empty_like(q_TNH)
        for bucket in buckets:
            rows = bucket.rows
            out_TNH[rows] = self._attend_bucket(bucket, q_TNH[rows], keys, values, spec.scale)
        return out_TNH

    def _attend_bucket(
        self,
        bucket: _Bucket,
        q_RNH: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        num_rows, _, head_dim = q_RNH.shape
        num_kv_heads = keys.shape[2]

        def gather(cache: torch.Tensor) -> torch.Tensor:  # -> [R, K, S, H]
            pages = cache.flatten(1).index_select(0, bucket.pages)
            return pages.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)

        out_RKGH = F.scaled_dot_product_attention(
            q_RNH.reshape(num_rows, num_kv_heads, -1, head_dim),
            gather(keys),
            gather(values),
            attn_mask=bucket.bias,
            scale=scale,
        )
        return out_RKGH.reshape(q_RNH.shape)

    def _make_buckets(self, window: int | None) -> list[_Bucket]:
        if window is None:
            first_T = np.zeros_like(self._positions_T)
        else:
            first_T = np.maximum(self._positions_T - window + 1, 0)
        size = self._cache.page_size
        bucket_T = bucket_of(self._last_T // size - first_T // size + 1)
        sizes = np.unique(bucket_T).tolist()
        return [
            self._make_bucket(rows, num_pages, first_T)
            for num_pages in sizes
            for rows in self._chunks(
                num_pages, None if len(sizes) == 1 else np.flatnonzero(bucket_T == num_pages)
            )
        ]

    def _chunks(self, num_pages: int, rows: np.ndarray | None) -> list[np.ndarray | slice]:
        """The rows (None: all) of one bucket, in chunks that bound the memory of the gather."""
        cache, num_rows = self._cache, len(self._positions_T)
        num_positions = num_pages * cache.page_size
        elements = num_positions * cache.keys.shape[3] * cache.keys.shape[4]
        chunk = max(1, _MAX_GATHERED_ELEMENTS // elements)
        if rows is None and chunk >= num_rows:
            return [slice(None)]
        rows = np.arange(num_rows) if rows is None else rows
        return [rows[start : start + chunk] for start in range(0, len(rows), chunk)]

    def _make_bucket(
        self, rows: np.ndarray | slice, num_pages: int, first_T: np.ndarray
    ) -> _Bucket:
        """`first_T`: the first position visible to each row."""
        size = self._cache.page_size
        last_R, first_R = self._last_T[rows], first_T[rows]
        first_page_R = first_R // size
        column_RP = first_page_R[:, None] + np.arange(num_pages)
        width = self._pages_TP.shape[1]
        pages_RP = np.take_along_axis(
            self._pages_TP[rows], np.minimum(column_RP, width - 1), axis=1
        )
        pages_RP[column_RP >= width] = SCRATCH_PAGE
        position_RS = first_page_R[:, None] * size + np.arange(num_pages * size)
        seen_RS = (position_RS >= first_R[:, None]) & (position_RS <= last_R[:, None])
        bias_RS = np.where(seen_RS, np.float32(0), np.float32(-np.inf))
        return _Bucket(
            rows=rows if isinstance(rows, slice) else self._upload(rows),
            pages=self._upload(np.ascontiguousarray(pages_RP).reshape(-1)),
            bias=self._upload(bias_RS)[:, None, None].to(self._cache.keys.dtype),
        )

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def bucket_of(num_pages: np.ndarray) -> np.ndarray:
    """Round up to 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: four sizes per octave.

    At most a quarter is wasted, and rows of many lengths form few buckets.
    """
    exponent = np.frexp(num_pages - 1)[1]  # bits of num_pages - 1
    step = 1 << np.maximum(exponent - 3, 0)
    return -(-num_pages // step) * step


@dataclass(slots=True)
class ForwardRows:
    count: int = 0
    # tokens, positions, last visible ones, pages, adapters, rotary positions
    _chunks: list[
        tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | int, np.ndarray]
    ] = field(default_factory=list)

    def add(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        pages: np.ndarray,
        adapters: np.ndarray | int = 0,
        rotary: np.ndarray | None = None,
        last: np.ndarray | None = None,
    ) -> None:
        """n rows: tokens [n], positions [n], page tables [n, P] and adapters [n]; [P] and a number
        when they share these. Where they differ from `positions`: `rotary` [n] or [3, n], and the
        `last` position [n] that each row sees."""
        rotary = positions if rotary is None else rotary
        last = positions if last is None else last
        self._chunks.append((tokens, positions, last, pages, adapters, rotary))
        self.count += len(tokens)

    def build(self) -> tuple[np.ndarray, ...]:
        """tokens [T], positions [T], last visible ones [T], pages [T, P], adapters [T] and rotary
        positions, [3, T] where they differ by axis, else [T]; all int64."""
        num_rows = whole_tiles(self.count)
        width = max(pages.shape[-1] for *_, pages, _, _ in self._chunks)
        has_axes = any(rotary.ndim == 2 for *_, rotary in self._chunks)
        tokens_T = np.zeros(num_rows, np.int64)
        positions_T, last_T = np.zeros((2, num_rows), np.int64)
        pages_TP = np.full((num_rows, width), SCRATCH_PAGE, np.int64)
        adapters_T = np.zeros(num_rows, np.int64)
        rotary_T = np.zeros((3, num_rows) if has_axes else num_rows, np.int64)
        start = 0
        for tokens, positions, last, pages, adapters, rotary in self._chunks:
            end = start + len(tokens)
            tokens_T[start:end] = tokens
            positions_T[start:end] = positions
            last_T[start:end] = last
            pages_TP[start:end, : pages.shape[-1]] = pages
            adapters_T[start:end] = adapters
            rotary_T[..., start:end] = rotary
            start = end
        return tokens_T, positions_T, last_T, pages_TP, adapters_T, rotary_T
