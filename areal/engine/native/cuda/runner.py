"""The CUDA runner: whole decode steps as CUDA graphs that run ahead of the host.

A decode step of R rows is captured once per bucket of R, and once more for rows that share prompts:
embedding, layers, LM head, sampling, and the update of the sampled slots, so that its output is the
next step's input and a launch is `num_steps` replays. The host uploads which slots run and reads
tokens back when an event signals the copy. Everything runs in order on one stream of the engine; a
trainer in the same process keeps its own.

Prefill is not captured: its shapes vary, and its kernels are long enough to hide their launches.

Shapes: K steps, R rows of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areal.engine.native.cuda.program import DeviceProgram
from areal.engine.native.cuda.shared_prompts import SharedPrompts

if TYPE_CHECKING:
    from areal.engine.native.runner import Chunk
    from areal.engine.native.scheduler import SlotTable
    from areal.models.common.decoder import Decoder

# Rows are padded to the next bucket; one graph per bucket.
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


class CudaRunner:
    steps_per_launch = 4
    launches_ahead = 1

    def __init__(
        self, model: Decoder, table: SlotTable, *, max_prefill_tokens: int, **program: Any
    ) -> None:
        self.max_prefill_tokens = max_prefill_tokens
        self._model = model
        self._device = model.embedding_weight.device
        self.stream = torch.cuda.Stream(self._device)
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            max_rows = _bucket_of(len(table.num_tokens))
            self._program = DeviceProgram(model, table, max_rows=max_rows, **program)
        # By bucket, and whether rows share prompts.
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._pool: torch.cuda._POOL_HANDLE | None = None  # memory of all graphs

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            return self._program.prefill(chunks)

    def draw(self, slots: np.ndarray, hidden: list[torch.Tensor]) -> DeviceTokens:
        program = self._program
        with torch.cuda.stream(self.stream):
            program.slots.update(slots)
            slot_R = program.slots.upload(slots.astype(np.int32))
            drawn = program.new_outputs(1, len(slots))
            program.begin()
            program.draw(slot_R, torch.stack(hidden), *drawn)
            return DeviceTokens.copy_from(*drawn)

    def decode(self, slots: np.ndarray, num_steps: int) -> DeviceTokens:
        program, num_rows = self._program, len(slots)
        bucket = _bucket_of(num_rows)
        with torch.cuda.stream(self.stream):
            program.slots.update(slots)
            plan = program.share_prompts(slots, bucket)
            key = (bucket, plan is not None)
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

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        with torch.cuda.stream(self.stream):
            self._program.copy_pages(sources, targets)

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

    def _capture(self, bucket: int, is_shared: bool) -> _Graph:
        """Captures the step of `bucket` rows; warm-up uses scratch rows."""
        program = self._program
        slot_R = torch.full((bucket,), program.slots.scratch, dtype=torch.int32).to(self._device)
        outputs = program.new_outputs(self.steps_per_launch, bucket)
        shared = program.new_shared(bucket) if is_shared else None
        program.step(slot_R, *outputs, shared)  # compiles kernels, allocates cuBLAS's workspace
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: a trainer on another thread may allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            program.step(slot_R, *outputs, shared)
        finally:
            graph.capture_end()
        self._pool = self._pool or graph.pool()
        captured = _Graph(graph, slot_R, *outputs, shared)
        self._graphs[bucket, is_shared] = captured
        return captured


def _bucket_of(num_rows: int) -> int:
    return next(bucket for bucket in _BUCKETS if bucket >= num_rows)
