"""The CUDA runner: whole decode steps as CUDA graphs that run ahead of the host.

A decode step of R rows is captured once per bucket of R, and once more for rows that share prompts
or have adapters: embedding, layers, LM head, sampling, and the update of the sampled slots, so that
its output is the next step's input and a launch is `num_steps` replays. The host uploads which
slots run and reads tokens back when an event signals the copy. Everything runs in order on one
stream of the engine; a trainer in the same process keeps its own.

Prefill is not captured: its shapes vary, and its kernels are long enough to hide their launches.

Shapes: K steps, R rows of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areal.engine.native.cuda.program import MAX_DRAFT_ROWS, DeviceProgram
from areal.engine.native.cuda.shared_prompts import SharedPrompts
from areal.engine.native.runner import Computed

if TYPE_CHECKING:
    from areal.engine.native.adapters import AdapterBank
    from areal.engine.native.runner import Chunk
    from areal.engine.native.scheduler import SlotTable
    from areal.models.common.decoder import Decoder
    from areal.models.vision.tower import Images, Sight

# Rows are padded to the next bucket; one graph per bucket.
_MAX_DRAFT = 16  # tokens a slot draws in one `verify`
# Of a `verify`, in steps of as many rows: the host waits for it, and nothing runs ahead.
_VERIFY_COST = 1.3
_ROW_SHARE = 0.01  # what one more row adds to a step, of the time to read the weights
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, *range(256, 4097, 64))


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Tokens being copied to pinned memory; `event` signals completion."""

    tokens_KR: torch.Tensor
    logprobs_KR: torch.Tensor
    event: torch.cuda.Event

    @classmethod
    def copy_from(cls, tokens_KR: torch.Tensor, logprobs_KR: torch.Tensor) -> DeviceTokens:
        tokens, logprobs = (
            torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            for x in (tokens_KR, logprobs_KR)
        )
        event = torch.cuda.Event()
        event.record()
        return cls(tokens, logprobs, event)

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        self.event.synchronize()
        return self.tokens_KR.numpy().T.tolist(), self.logprobs_KR.numpy().T.tolist()


@dataclass(frozen=True, slots=True)
class _Graph:
    """One captured step with its fixed inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    slot_R: torch.Tensor
    tokens_KR: torch.Tensor
    logprobs_KR: torch.Tensor
    shared: SharedPrompts | None

    def fill(self, rows: np.ndarray, plan: np.ndarray | None) -> None:
        """Asynchronous: the allocator keeps pinned memory until its copy is done."""
        self.slot_R.copy_(torch.from_numpy(rows).pin_memory(), non_blocking=True)
        if self.shared is not None:
            self.shared.flat.copy_(torch.from_numpy(plan).pin_memory(), non_blocking=True)


@dataclass(frozen=True, slots=True)
class _DraftGraph:
    """A captured `verify` with its fixed inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    slot_B: torch.Tensor
    drafts_BL: torch.Tensor
    tokens_BQ: torch.Tensor
    logprobs_BQ: torch.Tensor
    count_B: torch.Tensor


class CudaRunner:
    steps_per_launch = 4
    launches_ahead = 1

    def __init__(
        self,
        model: Decoder,
        table: SlotTable,
        adapters: AdapterBank,
        *,
        max_prefill_tokens: int,
        **program: Any,
    ) -> None:
        self.max_prefill_tokens = max_prefill_tokens
        self._model = model
        self._device = model.embedding_weight.device
        self.stream = torch.cuda.Stream(self._device)
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            max_rows = _bucket_of(len(table.num_tokens))
            self._program = DeviceProgram(model, table, adapters, max_rows=max_rows, **program)
        self.adapted_weights: frozenset[int] | None = self._program.adapters.weights
        # By bucket, whether rows share prompts, and generation of the adapters (0: rows have none).
        self._graphs: dict[tuple[int, bool, int], _Graph] = {}
        # By slots, drafted tokens, and generation.
        self._draft_graphs: dict[tuple[int, int, int], _DraftGraph] = {}
        self._generation = self._program.adapters.generation
        self._table = table
        self._weight_bytes = sum(p.nbytes for p in model.parameters())
        self._pool: torch.cuda._POOL_HANDLE | None = None  # memory of all graphs

    def look(self, images: Images) -> Sight:
        self.stream.wait_stream(torch.cuda.current_stream(self._device))  # it copied the pixels
        images.pixels.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            return self._model.look(images)

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            return self._program.prefill(chunks)

    def draw(self, slots: np.ndarray, hidden: list[torch.Tensor]) -> DeviceTokens:
        program = self._program
        with torch.cuda.stream(self.stream):
            program.update(slots)
            slot_R = program.slots.upload(slots.astype(np.int32))
            drawn = program.new_outputs(1, len(slots))
            program.begin()
            program.draw(slot_R, torch.stack(hidden), *drawn)
            return DeviceTokens.copy_from(*drawn)

    def decode(self, slots: np.ndarray, num_steps: int) -> DeviceTokens:
        program, num_rows = self._program, len(slots)
        bucket = _bucket_of(num_rows)
        with torch.cuda.stream(self.stream):
            generation = self._update(slots)
            plan = program.share_prompts(slots, bucket)
            key = (bucket, plan is not None, generation)
            graph = self._graphs.get(key) or self._capture(*key)
            rows = np.full(bucket, program.slots.scratch, np.int32)
            rows[:num_rows] = slots
            graph.fill(rows, plan)
            program.begin()
            for _ in range(num_steps):
                graph.graph.replay()
            return DeviceTokens.copy_from(
                graph.tokens_KR[:num_steps, :num_rows], graph.logprobs_KR[:num_steps, :num_rows]
            )

    def draft_length(self, num_rows: int) -> int:
        """One less than a power of two, so that there are few graphs. None with states: these
        cannot go back to before a draft that did not come true."""
        if self._model.args.delta is not None:
            return 0
        per_slot = MAX_DRAFT_ROWS // _bucket_of(num_rows)
        return min(1 << max(per_slot.bit_length() - 1, 0), _MAX_DRAFT) - 1

    def draft_cost(self, slots: np.ndarray, length: int) -> float:
        """A step reads the weights once and the cache once a row; the host waits for a `verify`."""
        cache = self._program.cache.token_bytes * float(self._table.num_tokens[slots].sum())
        row = self._weight_bytes * _ROW_SHARE * len(slots) + cache
        return _VERIFY_COST * (self._weight_bytes + (1 + length) * row) / (self._weight_bytes + row)

    def verify(self, slots: np.ndarray, drafts: list[list[int]]) -> Computed:
        program, bucket = self._program, _bucket_of(len(slots))
        length = self.draft_length(len(slots))
        while length > 1 and length // 2 >= max(map(len, drafts)):
            length //= 2
        rows = np.full((bucket, 1 + length), -1, np.int32)
        rows[:, 0] = program.slots.scratch
        rows[: len(slots), 0] = slots
        for row, draft in zip(rows, drafts, strict=False):
            row[1 : 1 + len(draft)] = draft
        with torch.cuda.stream(self.stream):
            key = (bucket, length, self._update(slots))
            graph = self._draft_graphs.get(key) or self._capture_drafts(*key)
            given = torch.from_numpy(rows).pin_memory()
            graph.slot_B.copy_(given[:, 0], non_blocking=True)
            graph.drafts_BL.copy_(given[:, 1:], non_blocking=True)
            graph.graph.replay()
            outputs = (graph.count_B, graph.tokens_BQ, graph.logprobs_BQ)
            count_B, tokens_BQ, logprobs_BQ = (x[: len(slots)].tolist() for x in outputs)
        return Computed(
            [row[:count] for row, count in zip(tokens_BQ, count_B, strict=True)],
            [row[:count] for row, count in zip(logprobs_BQ, count_B, strict=True)],
        )

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        with torch.cuda.stream(self.stream):
            self._program.copy_pages(sources, targets)

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        with torch.cuda.stream(self.stream):
            self._program.copy_states(sources, targets)

    def routed_experts(self, pages: list[int], num_tokens: int) -> np.ndarray:
        with torch.cuda.stream(self.stream):
            return self._program.routed_experts(pages, num_tokens)

    def load(self, model_weights: list[tuple[str, torch.Tensor]]) -> None:
        """Weights that are the model's own storage (a colocated trainer's) are not copied."""
        theirs = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(theirs)
        with torch.cuda.stream(self.stream):
            for name, tensor in model_weights:
                self._model.load_hf_tensor(name, tensor)
        theirs.wait_stream(self.stream)  # the sources may change as soon as this returns

    def _update(self, slots: np.ndarray) -> int:
        """Upload what has changed of `slots`; the generation of their adapters. Graphs of stacks
        that are no longer there are dropped."""
        is_adapted, generation = self._program.update(slots), self._program.adapters.generation
        if generation > self._generation:
            self.stream.synchronize()  # they may still run
            _drop_adapted(self._graphs)
            _drop_adapted(self._draft_graphs)
            if not (self._graphs or self._draft_graphs):
                self._pool = None  # a pool ends with its last graph
            self._generation = generation
        return generation if is_adapted else 0

    def _capture(self, bucket: int, is_shared: bool, generation: int) -> _Graph:
        """Captures the step of `bucket` rows; warm-up uses scratch rows."""
        program = self._program
        slot_R = self._scratch_rows(bucket)
        outputs = program.new_outputs(self.steps_per_launch, bucket)
        shared = program.new_shared(bucket) if is_shared else None
        adapted = generation > 0
        graph = self._capture_work(lambda: program.step(slot_R, *outputs, shared, adapted=adapted))
        captured = _Graph(graph, slot_R, *outputs, shared)
        self._graphs[bucket, is_shared, generation] = captured
        return captured

    def _capture_drafts(self, bucket: int, length: int, generation: int) -> _DraftGraph:
        program = self._program
        slot_B = self._scratch_rows(bucket)
        drafts_BL = slot_B.new_full((bucket, length), -1)
        outputs = *program.new_outputs(bucket, 1 + length), slot_B.new_ones(bucket)
        adapted = generation > 0
        graph = self._capture_work(
            lambda: program.verify(slot_B, drafts_BL, *outputs, adapted=adapted)
        )
        captured = _DraftGraph(graph, slot_B, drafts_BL, *outputs)
        self._draft_graphs[bucket, length, generation] = captured
        return captured

    def _scratch_rows(self, count: int) -> torch.Tensor:
        scratch = self._program.slots.scratch
        return torch.full((count,), scratch, dtype=torch.int32).to(self._device)

    def _capture_work(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        work()  # compiles kernels, allocates cuBLAS's workspace
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: a trainer on another thread may allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph


def _drop_adapted(graphs: dict[Any, Any]) -> None:
    for key in [key for key in graphs if key[2] > 0]:
        del graphs[key]


def _bucket_of(num_rows: int) -> int:
    return next(bucket for bucket in _BUCKETS if bucket >= num_rows)
