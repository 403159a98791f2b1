"""Models of 7B to 235B on 8 to 1024 GPUs: the fastest layout of each, on paper.

    for row in scale_rows(load_device("h200")): ...

The workload grows with the GPUs: for each of them 8 prompts of 512 tokens a step, 16 samples of a
prompt, answers of 4,096 tokens on average and 16,384 at most, staleness 2. Trained by archon with
selective or full checkpointing, in micro-batches of up to 32,768 tokens; served by the native
engine, to which changes of weights travel (weight_update_mode delta).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.models import decoder_args
from areal.planner.devices import Device
from areal.planner.engines import Servers, Trainer
from areal.planner.layouts import Split, best_split
from areal.planner.memory import ServerRank, TrainingRank
from areal.planner.plan import Setup
from areal.planner.shapes import Shape
from areal.planner.speed import Generation, Training
from areal.planner.workload import Workload
from areal.utils.model_files import read_json

_MODELS = Path(__file__).parent / "known_models.json"
_LARGE = (
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen2.5-72B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
)
GPUS = (8, 64, 256, 1024)
_PROMPTS_PER_GPU = 8
_LOAD = Workload(
    prompts=1, samples=16, prompt=512, output=4096, max_output=16384, spread=0.7, staleness=2
)


@dataclass(frozen=True, slots=True)
class ScaleRow:
    model: str
    gpus: int
    split: Split | None  # None: it does not fit


def known_models() -> Mapping[str, Mapping[str, Any]]:
    """What the config.json of well-known models says, by hub name; those of examples/ are here."""
    return read_json(_MODELS)


def scale_rows(device: Device) -> Iterator[ScaleRow]:
    known = known_models()
    for name in _LARGE:
        setup = _setup(Shape(decoder_args(known[name])), device)
        for gpus in GPUS:
            load = replace(_LOAD, prompts=_PROMPTS_PER_GPU * gpus)
            yield ScaleRow(name.partition("/")[2], gpus, best_split(setup, load, gpus))


def _setup(shape: Shape, device: Device) -> Setup:
    both = {"shape": shape, "device": device}
    rank = TrainingRank(**both, tokens=1, mode="selective")
    trainer = Trainer(Training(**both), rank, max_tokens=32768, min_micro_batches=1)
    server = ServerRank(**both)
    return Setup(
        trainers={"actor": trainer},
        groups=[["actor"]],
        servers=Servers(Generation(**both), server, count=1, recomputes_cache=True),
        asks_actor=True,
        update_mode="delta",
        takes_turns=False,
    )
