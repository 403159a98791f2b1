"""NativeLocalEngine: a native engine in this process behind the InferenceEngine contract.

The same engine thread as in the server, without HTTP: for tests, notebooks, and colocated training
and generation on one device, where weights are passed directly.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse, OnTokens, WeightUpdateMeta
from areal.engine.native import inspection
from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineEndedError, EngineLoop, Result
from areal.engine.native.scoring import padded_scores, token_lists
from areal.engine.native.sequence import GenRequest, Progress
from areal.engine.native.tokenizer import ModelText
from areal.engine.native.weight_loader import LoraUpdate, load
from areal.engine.native.wire import Refusal, Reply, check_supported
from areal.models.hf_io import dtype_named
from areal.utils.hub import model_folder
from areal.utils.perf_tracer import trace_generation
from areal.utils.waits import waiting
from areal.weight_sync.bucket import Checksums
from areal.weight_sync.transports import open_sent

_HERE = "in this process"  # in place of a server's address


class NativeLocalEngine(InferenceEngine):
    """`initialize` loads the model; the options are those of `NativeEngine.from_pretrained`, and
    `return_routed_experts`: responses have the experts of their tokens (router replay).

    engine = NativeLocalEngine(path)
    engine.initialize()
    reply = await engine.agenerate(ModelRequest(input_ids=[5, 7]))
    engine.destroy()
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        max_running: int = 512,
        batch_invariant: bool = False,
        seed: int = 0,
        return_routed_experts: bool = False,
    ) -> None:
        self._return_routed_experts = return_routed_experts
        self._folder = model_folder(model_path)
        self._text = ModelText(self._folder)
        self._options = {
            "device": device,
            "dtype": dtype_named(dtype),
            "page_size": page_size,
            "num_pages": num_pages,
            "max_running": max_running,
            "batch_invariant": batch_invariant,
            "seed": seed,
        }
        self._started: EngineLoop | None = None
        self._num_sent = itertools.count()

    def initialize(self) -> None:
        if self._started is None:
            engine = NativeEngine.from_pretrained(self._folder, **self._options)
            self._started = EngineLoop(engine)

    def destroy(self) -> None:
        if self._started is not None:
            self._started.close()
            self._started = None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        check_supported(req)
        start = time.perf_counter()
        # Copies of a request share its rid; inside the engine each has its own.
        rid = f"{req.rid}.{next(self._num_sent)}"
        interval = 0 if req.on_tokens is None else 1
        request = GenRequest(
            rid,
            req.input_ids,
            req.gconfig,
            progress_tokens=interval,
            grammar=req.grammar,
            return_routed_experts=self._return_routed_experts,
            image_data=req.image_data,
        )
        if self._text.has_to_prepare(request):  # in a thread: it may take seconds
            request = await asyncio.to_thread(self._text.prepare, request)
        with waiting("generation in this process"):
            reply = await self._generate(request, req.on_tokens)
        ended = time.perf_counter()
        trace_generation(start, ended, reply.ttft)
        return reply.response(req, latency=ended - start)

    def pause_generation(self) -> None:
        self._loop.pause()

    def continue_generation(self) -> None:
        self._loop.resume()

    def update_weights(
        self,
        meta: WeightUpdateMeta,
        named_tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        source = named_tensors
        if source is None:
            source = open_sent(meta.path, version=meta.version, key=meta.key)
        adapter = LoraUpdate(meta.lora_name, meta.lora_alpha) if meta.use_lora else None
        self._loop.call(
            lambda engine: load(engine, source, meta.version, meta.recompute_kv, adapter)
        ).result()

    def compute_logp(self, data: dict[str, Any]) -> torch.Tensor:
        sequences = token_lists(data)
        scores = self._loop.call(lambda engine: engine.score(sequences)).result()
        return padded_scores([one.logprobs for one in scores], data)

    def weight_checksums(self) -> dict[str, Checksums]:
        return {_HERE: self._loop.call(inspection.weight_checksums).result()}

    def layer_trace(self, tokens: Sequence[int]) -> dict[str, dict[str, Any]]:
        trace = self._loop.call(partial(inspection.layer_trace, tokens=tokens))
        return {_HERE: trace.result()}

    def offload(self, tags: Sequence[str] | None = None) -> None:
        self._loop.call(lambda engine: engine.offload(tags)).result()

    def onload(self, tags: Sequence[str] | None = None) -> None:
        self._loop.call(lambda engine: engine.onload(tags)).result()

    def get_version(self) -> int:
        return self._loop.version

    def stats(self) -> dict[str, float]:
        return self._loop.stats()

    def busy_intervals(self, since: float) -> dict[str, list[tuple[float, float]]]:
        return {_HERE: self._loop.busy.since(since)}

    @property
    def _loop(self) -> EngineLoop:
        if self._started is None:
            raise RuntimeError("the engine is not running; call initialize() first")
        return self._started

    async def _generate(self, request: GenRequest, on_tokens: OnTokens | None) -> Reply:
        events = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = events.create_future()

        def take(results: Sequence[Result]) -> None:
            nonlocal on_tokens
            for result in results:
                if not isinstance(result, Progress):
                    _settle(future, result)
                elif result.is_broken or future.done():
                    on_tokens = None  # nor anything after it
                elif on_tokens is not None:
                    on_tokens(result.tokens, result.logprobs)

        def deliver(results: Sequence[Result]) -> None:  # on the engine thread
            events.call_soon_threadsafe(take, results)

        self._loop.submit([request], deliver)
        try:
            return await future
        except asyncio.CancelledError:
            self._loop.discard([request.rid])
            raise


def _settle(future: asyncio.Future[Reply], result: Reply | Refusal) -> None:
    if future.done():
        return
    if isinstance(result, Reply):
        future.set_result(result)
    else:
        kind = ValueError if result.kind == "request" else EngineEndedError
        future.set_exception(kind(result.message))
