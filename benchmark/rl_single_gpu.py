"""The whole loop on one GPU: generate, train, give the weights back. How near is it to its limit?

    python benchmark/rl_single_gpu.py [--steps 3] [--json FILE] [--tiny]

Native engine and Archon in one process, random weights in the shape of Qwen2.5 1.5B, bfloat16. A
step trains on `requests` answers with their prompts by GRPO and hands the engine its weights
directly. At staleness 0 the two halves take turns; at staleness n the engine is up to n batches
ahead, and both share the device.

The ceiling is what the halves give when each has the device for itself: a token trained costs the
time of its generation and of its training, 1 / (1 / a + 1 / b). Answers are counted with prompts.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Row, print_table, write_json
from training import SHAPE, TINY, DrawnEngine, grpo_loss, synchronize

from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec
from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.sequence import GenRequest
from areal.engine.native.wire import Reply
from areal.models.hf_io import build_model

_PAGE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Each batch: `prompts` distinct prompts of `num_in` tokens, `samples` answers of each."""

    prompts: int = 16
    samples: int = 16
    num_in: int = 256
    num_out: int = 512
    max_tokens_per_mb: int = 32768

    @property
    def num_requests(self) -> int:
        return self.prompts * self.samples

    @property
    def num_tokens(self) -> int:
        return self.num_requests * (self.num_in + self.num_out)


class Generator:
    """Batches of answers from a native engine, in the order they were asked for."""

    def __init__(self, loop: EngineLoop, load: Load, vocab_size: int) -> None:
        self._loop, self._load, self._vocab_size = loop, load, vocab_size
        self._random = random.Random(0)
        self._waiting: list[tuple[list[list[int]], queue.SimpleQueue]] = []
        self._num_asked = 0

    def ask(self) -> None:
        load = self._load
        prompts = [
            [self._random.randrange(self._vocab_size) for _ in range(load.num_in)]
            for _ in range(load.prompts)
        ]
        inputs = [prompt for prompt in prompts for _ in range(load.samples)]
        gconfig = GenerationHyperparameters(max_new_tokens=load.num_out, ignore_eos=True)
        name = f"batch{self._num_asked}"
        requests = [GenRequest(f"{name}.{i}", ids, gconfig) for i, ids in enumerate(inputs)]
        replies: queue.SimpleQueue = queue.SimpleQueue()
        self._loop.submit(requests, replies.put)
        self._waiting.append((inputs, replies))
        self._num_asked += 1

    def take(self) -> dict[str, torch.Tensor]:
        """The oldest batch asked for, when all its answers are there, as the trainer wants it."""
        inputs, replies = self._waiting.pop(0)
        answers: dict[int, Reply] = {}
        while len(answers) < len(inputs):
            for reply in replies.get():
                assert isinstance(reply, Reply), reply
                answers[int(reply.rid.rpartition(".")[2])] = reply
        ids = torch.tensor([p + answers[i].finished.output_tokens for i, p in enumerate(inputs)])
        mask = torch.ones_like(ids, dtype=torch.bool)
        loss_mask = mask.clone()
        loss_mask[:, : self._load.num_in - 1] = loss_mask[:, -1] = False
        advantages = torch.randn(len(ids), 1).expand(ids.shape).contiguous()
        return {
            "input_ids": ids.int(),
            "attention_mask": mask,
            "loss_mask": loss_mask,
            "advantages": advantages,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    args = parser.parse_args()
    shape = SHAPE | TINY if args.tiny else SHAPE
    load = Load(2, 2, 8, 8) if args.tiny else Load()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        trainer = open_trainer(folder, load, compiled=not args.tiny)
    loop = open_engine(trainer, shape, load, ahead=max(args.staleness))
    generator = Generator(loop, load, shape["vocab_size"])
    rows = measure(trainer, loop, generator, load, args)
    loop.close()
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def open_trainer(folder: str, load: Load, *, compiled: bool) -> DrawnEngine:
    config = TrainEngineConfig(
        path=folder,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=load.max_tokens_per_mb),
        optimizer=OptimizerConfig(lr=1e-6),
        gradient_checkpointing=True,
        archon=ArchonEngineConfig(enable_compile=compiled),
    )
    trainer = DrawnEngine(config)
    trainer.initialize(FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1))
    return trainer


def open_engine(trainer: DrawnEngine, shape: dict, load: Load, *, ahead: int) -> EngineLoop:
    weight = trainer.model.tok_embeddings.weight
    model = build_model(shape, device=weight.device, dtype=weight.dtype)
    pages_per_request = -(-(load.num_in + load.num_out) // _PAGE) + 1
    num_running = load.num_requests * (ahead + 1)
    engine = NativeEngine(
        model,
        page_size=_PAGE,
        num_pages=1 + num_running * pages_per_request,
        max_running=num_running,
    )
    engine.load_weights(trainer.hf_weights(), 0, recompute_kv=False)
    return EngineLoop(engine)


def measure(
    trainer: DrawnEngine,
    loop: EngineLoop,
    generator: Generator,
    load: Load,
    args: argparse.Namespace,
) -> list[Row]:
    run_steps(trainer, loop, generator, steps=2, staleness=max(args.staleness))  # compile, capture
    start = time.perf_counter()
    generator.ask()
    batch = generator.take()
    generate_s = time.perf_counter() - start
    start = time.perf_counter()
    train(trainer, batch)
    train_s = time.perf_counter() - start
    ceiling = load.num_tokens / (generate_s + train_s)
    rows = [
        Row("generate_alone", load.num_tokens / generate_s, "tokens/s"),
        Row("train_alone", load.num_tokens / train_s, "tokens/s"),
        Row("ceiling", ceiling, "tokens/s"),
    ]
    for staleness in args.staleness:
        start = time.perf_counter()
        run_steps(trainer, loop, generator, args.steps, staleness)
        rate = args.steps * load.num_tokens / (time.perf_counter() - start)
        rows.append(Row(f"staleness_{staleness}", rate, "tokens/s"))
        rows.append(Row(f"staleness_{staleness}_share", rate / ceiling, "of the ceiling"))
    return rows


def run_steps(
    trainer: DrawnEngine, loop: EngineLoop, generator: Generator, steps: int, staleness: int
) -> None:
    """`steps` updates, from nothing asked for to nothing under way."""
    num_asked = 0
    for step in range(steps):
        while num_asked < min(steps, step + 1 + staleness):
            generator.ask()
            num_asked += 1
        train(trainer, generator.take())
        give_weights(trainer, loop)


def train(trainer: DrawnEngine, batch: dict[str, torch.Tensor]) -> None:
    stats = trainer.train_batch(batch, grpo_loss, lambda mb: mb["loss_mask"].sum())
    assert stats["update_successful"], stats
    synchronize()


def give_weights(trainer: DrawnEngine, loop: EngineLoop) -> None:
    version = loop.version + 1
    loop.call(
        lambda engine: engine.load_weights(trainer.hf_weights(), version, recompute_kv=False)
    ).result()


if __name__ == "__main__":
    main()
