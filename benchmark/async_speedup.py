"""How much asynchrony buys: tokens trained per second with staleness 2, over staleness 0.

    python benchmark/async_speedup.py [--steps 40] [--json FILE]

Both arms of a load run one after the other on the same machine with the same config, but for
`rollout.max_head_offpolicyness`; each is a real run (server process, rewards, ledger, weight sync).

| row            | load                                                                        |
|----------------|-----------------------------------------------------------------------------|
| `speedup_demo` | `areal demo`'s own run                                                      |
| `speedup_tail` | output lengths with a long tail: most short, a few ten times as long        |
| `speedup_env`  | every answer waits 50-200 ms for an environment before it has a reward      |
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from report import Row, print_table, write_json

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.workflow_context import workflow_context
from areal.cli.demo import make_model, recipe_path
from areal.cli.train import load_config
from areal.run.database import open_read_only
from areal.run.paths import RunPaths
from areal.trainer.experiment import load_datasets, run_experiment
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import logging
from areal.workflow.rlvr import RLVRWorkflow

WARM_UP_STEPS = 8  # start of the processes, first batches
LONGEST = 200  # tokens of the longest answer of the load `tail`


def _draw() -> random.Random:
    """The same draw for the same sample in both arms."""
    episode = workflow_context.get()
    return random.Random(f"{episode.task_id}/{episode.sample}")


@dataclass(frozen=True, slots=True)
class FixedLength:
    """An engine whose answers have exactly `length` tokens."""

    engine: InferenceEngine
    length: int

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        request.gconfig = request.gconfig.new(
            max_new_tokens=self.length, min_new_tokens=self.length, ignore_eos=True
        )
        return await self.engine.agenerate(request)


class TailWorkflow(RLVRWorkflow):
    """Answers whose length is drawn from a long tail instead of ended by the model."""

    async def arun_episode(self, engine, data):
        length = min(4 + int(_draw().paretovariate(1.1) * 6), LONGEST)
        return await super().arun_episode(FixedLength(engine, length), data)


class EnvironmentWorkflow(RLVRWorkflow):
    """An environment answers after 50 to 200 ms; only then is there a reward."""

    async def arun_episode(self, engine, data):
        trajectory = await super().arun_episode(engine, data)
        await asyncio.sleep(_draw().uniform(0.05, 0.2))
        return trajectory


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    workflow: Callable[..., RLVRWorkflow] | None
    overrides: tuple[str, ...]


LOADS = (
    Load("demo", None, ()),
    Load(
        "tail",
        TailWorkflow,
        ("train_dataset.batch_size=16", "gconfig.n_samples=4", f"gconfig.max_new_tokens={LONGEST}"),
    ),
    Load(
        "env",
        EnvironmentWorkflow,
        ("train_dataset.batch_size=16", "gconfig.n_samples=8"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="measured steps per arm")
    parser.add_argument("--model", help="model folder; default: the demo's, warm-started first")
    parser.add_argument("--only", nargs="+", choices=[load.name for load in LOADS])
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or warm_start(folder)
        loads = [load for load in LOADS if not args.only or load.name in args.only]
        rows = _measure(loads, Path(folder), model, args.steps)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def warm_start(folder: str) -> str:
    make_model(Path(folder) / "tiny_model")
    config = load_config([recipe_path("arithmetic_sft.yaml"), f"cluster.fileroot={folder}"])
    run_experiment(config)
    return str(RunPaths.of(config).model)


def _measure(loads: Sequence[Load], folder: Path, model: str, steps: int) -> list[Row]:
    rows = []
    for load in loads:
        speeds = {eta: _tokens_per_second(load, eta, folder, model, steps) for eta in (0, 2)}
        for eta, speed in speeds.items():
            rows.append(Row(f"{load.name}_staleness_{eta}", speed, "tokens trained/s"))
        rows.append(Row(f"speedup_{load.name}", speeds[2] / speeds[0], "x"))
    return rows


def _tokens_per_second(load: Load, eta: int, folder: Path, model: str, steps: int) -> float:
    config = load_config(
        [
            recipe_path("arithmetic_grpo.yaml"),
            f"cluster.fileroot={folder}",
            f"actor.path={model}",
            f"trial_name={load.name}-{eta}",
            f"total_train_steps={WARM_UP_STEPS + steps}",
            f"rollout.max_head_offpolicyness={eta}",
            "evaluator.eval_before_train=false",
            "evaluator.freq_steps=null",
            *load.overrides,
        ]
    )
    train, _ = load_datasets(config)
    with logging.quiet(), PPOTrainer(config, train) as trainer:
        trainer.train(workflow=load.workflow)
    with closing(open_read_only(RunPaths.of(config).database)) as connection:
        rows = connection.execute(
            "SELECT time, json_extract(stats, '$.tokens') AS tokens FROM steps ORDER BY step"
        ).fetchall()
    measured = rows[WARM_UP_STEPS:]
    seconds = measured[-1]["time"] - rows[WARM_UP_STEPS - 1]["time"]
    return sum(row["tokens"] for row in measured) / seconds


if __name__ == "__main__":
    sys.exit(main())
