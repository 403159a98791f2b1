"""What a weight update costs by each transport: bytes, seconds, how long generation stands still.

    python benchmark/weight_sync.py [--only TRANSPORT ...] [--repeats N] [--json FILE] [--tiny]

Weights leave in bfloat16 for an engine that generates all the while: in this process (`direct`), or
in a server process of its own. Between two updates every weight moves by at most 1e-6, a usual
learning rate. Random weights in the shape of Qwen2.5 1.5B on a GPU, of 50 MB on a CPU; `--tiny` is
smaller still, to see that it runs.

| row        | meaning                                                                            |
|------------|------------------------------------------------------------------------------------|
| T_mb       | bytes that travel                                                                  |
| T_seconds  | from the trainer's call until the new weights serve                                |
| T_stall_ms | of these, how long the engine made no step (gaps below 5 ms are not seen)          |
| T_share    | weights over seconds, as a share of the bandwidth measured in this run: of memory  |
|            | (the device's for direct and ipc on a GPU), for disk and delta that of the disk    |

Medians of several updates; the first one, which opens groups and publishes whole weights, is not
counted. `delta_changed` is the share of weights whose bits changed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from generation import SHAPES
from report import Row, print_table, write_json

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.inference import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.engine.train.export import send_weights
from areal.models.hf_io import build_model, save_hf
from areal.utils.device import best_device
from areal.weight_sync.transports import PublicationRoot

TRANSPORTS = ("direct", "ipc", "shm", "xccl", "disk", "delta")
CPU_SHAPE = SHAPES["1.5b"] | {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "vocab_size": 16000,
    "max_position_embeddings": 1024,
}
TINY_SHAPE = CPU_SHAPE | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
LEARNING_RATE = 1e-6
NUM_REQUESTS = 4
NUM_PAGES = 512
TOKEN = "of-this-benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=TRANSPORTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file to write the rows to")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    args = parser.parse_args()
    device = best_device()
    shape = TINY_SHAPE if args.tiny else SHAPES["1.5b"] if device == "cuda" else CPU_SHAPE
    wanted = args.only or [kind for kind in TRANSPORTS if kind != "ipc" or device == "cuda"]
    with tempfile.TemporaryDirectory(prefix="areal-weights-") as scratch:
        trainer = Trainer(shape, device)
        model = Path(scratch) / "model"
        save_hf(iter(trainer.weights()), shape | {"eos_token_id": None}, model)
        bandwidths = measure_bandwidths(device, scratch, trainer.num_bytes)
        rows = bandwidths.rows()
        for kind in wanted:
            folder = Path(scratch) / kind
            rows += measure(kind, trainer, model, folder, bandwidths, args.repeats)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


class Trainer:
    """Weights in float32 that move a little, and leave in bfloat16."""

    def __init__(self, shape: dict[str, Any], device: str) -> None:
        model = build_model(shape, device=device, dtype=torch.float32)
        model.init_weights(0)
        self.masters = {name: tensor.detach() for name, tensor in model.named_hf_tensors()}
        self.num_bytes = sum(2 * tensor.numel() for tensor in self.masters.values())

    def step(self) -> float:
        """The share of the weights, as they leave, that changed."""
        num_changed = 0
        for tensor in self.masters.values():
            before = tensor.bfloat16()
            tensor += LEARNING_RATE * (2 * torch.rand_like(tensor) - 1)
            num_changed += int((before != tensor.bfloat16()).sum())
        return 2 * num_changed / self.num_bytes

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Held by the caller, as ipc wants it."""
        return [(name, tensor.bfloat16()) for name, tensor in self.masters.items()]


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second, written."""

    memory: float
    device: float
    disk: float

    def rows(self) -> list[Row]:
        names = ("memory", "device", "disk")
        return [Row(f"bandwidth_{name}", getattr(self, name) / 1e9, "GB/s") for name in names]

    def of(self, kind: str) -> float:
        if kind in ("disk", "delta"):
            return self.disk
        return self.device if kind in ("direct", "ipc") else self.memory


def measure_bandwidths(device: str, scratch: str, num_bytes: int) -> Bandwidths:
    host = torch.ones(num_bytes, dtype=torch.uint8)
    near = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copies = (torch.empty_like(host), torch.empty_like(near))

    def write() -> None:
        with open(Path(scratch) / "bandwidth", "wb") as file:
            file.write(host.numpy())
            file.flush()
            os.fsync(file.fileno())

    def copy_near() -> None:
        copies[1].copy_(near)
        if device == "cuda":
            torch.cuda.synchronize()

    works = (lambda: copies[0].copy_(host), copy_near, write)
    return Bandwidths(*(num_bytes / _median_seconds(work) for work in works))


def measure(
    kind: str, trainer: Trainer, model: Path, folder: Path, bandwidths: Bandwidths, repeats: int
) -> list[Row]:
    seconds, stalls, sizes, changed = [], [], [], []
    with ExitStack() as stack:
        root = stack.enter_context(
            PublicationRoot(kind, run_name="benchmark", disk_root=folder / "weights")
        )
        engine = open_engine(kind, model, stack)
        meta = root.meta(gen_allocation=ModelAllocation.from_str("native:d1"))
        send_weights(engine, meta.with_version(1), trainer.weights())
        stack.enter_context(generation(engine))
        for version in range(2, 2 + repeats):
            changed.append(trainer.step())
            weights = trainer.weights()
            start = time.time()
            send_weights(engine, meta.with_version(version), weights)
            end = time.time()
            seconds.append(end - start)
            time.sleep(0.2)  # the step that runs now ends, and is then known of
            stalls.append(stall(engine, start, end))
            sizes.append(_published(root, version) or trainer.num_bytes)
    median = statistics.median(seconds)
    rows = [
        Row(f"{kind}_mb", statistics.median(sizes) / 1e6, "MB"),
        Row(f"{kind}_seconds", median, "s"),
        Row(f"{kind}_stall_ms", 1e3 * statistics.median(stalls), "ms"),
        Row(f"{kind}_share", trainer.num_bytes / median / bandwidths.of(kind), "of bandwidth"),
    ]
    if kind == "delta":
        rows.append(Row("delta_changed", statistics.median(changed), "of weights"))
    return rows


def open_engine(kind: str, model: Path, stack: ExitStack) -> InferenceEngine:
    options = {"device": best_device(), "num_pages": NUM_PAGES}
    if kind == "direct":
        engine: InferenceEngine = NativeLocalEngine(model, **options)
    else:
        child, address = launch_native_server(model, token=TOKEN, **options)
        stack.callback(child.terminate)
        engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=600)
    stack.callback(engine.destroy)
    engine.initialize()
    return engine


@contextmanager
def generation(engine: InferenceEngine) -> Iterator[None]:
    """Keeps a few requests running until the block is left."""
    events = asyncio.new_event_loop()
    thread = threading.Thread(target=events.run_forever, name="generation")
    thread.start()
    options = GenerationHyperparameters(max_new_tokens=512, ignore_eos=True)

    async def generate(number: int) -> None:
        while True:
            await engine.agenerate(ModelRequest(input_ids=[5, 7, number], gconfig=options))

    tasks = [asyncio.run_coroutine_threadsafe(generate(n), events) for n in range(NUM_REQUESTS)]
    time.sleep(1.0)  # until all of them run, and graphs are there
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # an engine that failed has no stall to speak of
    finally:
        for task in tasks:
            task.cancel()
        engine.destroy()
        events.call_soon_threadsafe(events.stop)
        thread.join()


def stall(engine: InferenceEngine, start: float, end: float) -> float:
    """Seconds between `start` and `end` in which no step ran."""
    (intervals,) = engine.busy_intervals(start).values()
    busy = sum(max(0.0, min(last, end) - max(first, start)) for first, last in intervals)
    return end - start - busy


def _published(root: PublicationRoot, version: int) -> int:
    """Bytes of the files of a version; 0 where nothing is published, or only handles."""
    if root.path is None:
        return 0
    return sum(
        file.stat().st_size
        for file in (root.path / f"weight_update_v{version}").glob("bucket_*.safetensors")
    )


def _median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
