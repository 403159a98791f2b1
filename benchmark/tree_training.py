"""How much faster a training step is when tokens that sequences share are computed once.

    python benchmark/tree_training.py [--rows ROW ...] [--json FILE] [--tiny]

| row                    | batch                                                                   |
|------------------------|-------------------------------------------------------------------------|
| tree_speedup_16x2k     | 16 answers of 512 tokens to one prompt of 2048                          |
| tree_speedup_agent_4x8 | 4 episodes of 8 turns, each turn a sample with all turns before it: a   |
|                        | task of 1024 tokens, 512 more per turn                                  |

A row is the time of a packed step over that of a tree step: the same engine, weights, batch, GRPO
loss and token budget per micro-batch, optimizer included, median of several steps taken in turn.
Random weights in the shape of Qwen2.5 1.5B, bfloat16. Beside it: both times, the share of the
tokens that the tree has, how far log-probabilities are apart, and the gradients' norms. `--tiny` is
a small model with short sequences, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from generation import SHAPES
from report import Row, print_table, write_json

from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec
from areal.engine.train.archon import ArchonEngine

TINY_SHAPE = SHAPES["1.5b"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
TINY_DIVISOR = 32  # of all lengths


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    answer: int


def group(rng: random.Random, size: int, lengths: Lengths) -> list[list[int]]:
    prompt = _tokens(rng, lengths.prompt)
    return [prompt + _tokens(rng, lengths.answer) for _ in range(size)]


def agents(rng: random.Random, episodes: int, turns: int, lengths: Lengths) -> list[list[int]]:
    task = _tokens(rng, lengths.prompt)
    samples = []
    for _ in range(episodes):
        history = task
        for _ in range(turns):
            history = history + _tokens(rng, lengths.answer)
            samples.append(history)
    return samples


ROWS: dict[str, tuple[Callable[..., list[list[int]]], Lengths]] = {
    "tree_speedup_16x2k": (lambda rng, n: group(rng, 16, n), Lengths(2048, 512)),
    "tree_speedup_agent_4x8": (lambda rng, n: agents(rng, 4, 8, n), Lengths(1024, 512)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each kind")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = measure(args.rows, steps=args.steps, max_tokens=args.max_tokens, tiny=args.tiny)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(names: list[str], *, steps: int, max_tokens: int, tiny: bool) -> list[Row]:
    engine = open_engine(TINY_SHAPE if tiny else SHAPES["1.5b"], max_tokens)
    rows: list[Row] = []
    for name in names:
        make, lengths = ROWS[name]
        if tiny:
            lengths = Lengths(lengths.prompt // TINY_DIVISOR, lengths.answer // TINY_DIVISOR)
        batch = as_batch(make(random.Random(0), lengths), lengths.answer)
        rows += compare(engine, name, batch, steps)
    engine.destroy()
    return rows


def open_engine(shape: dict[str, Any], max_tokens: int) -> ArchonEngine:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**shape, "hidden_act": "silu"}))
        config = TrainEngineConfig(
            path=folder,
            init_from_scratch=True,
            enable_tree_training=True,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens),
            # Too little to move a weight: every step computes the same.
            optimizer=OptimizerConfig(lr=1e-30, weight_decay=0.0, warmup_steps=0),
        )
        engine = ArchonEngine(config)
        engine.initialize(FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1))
    return engine


def as_batch(sequences: list[list[int]], answer: int) -> dict[str, torch.Tensor]:
    """Every sample learns its last `answer` tokens, each sample with an advantage of its own."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    column = torch.arange(int(lengths.max()))
    mask = column < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int32)
    ids[mask] = torch.tensor([token for row in sequences for token in row], dtype=torch.int32)
    learn = (column < lengths[:, None] - 1) & (column >= lengths[:, None] - 1 - answer)
    advantages = torch.linspace(-1, 1, len(sequences))[:, None].expand(mask.shape).contiguous()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": learn,
        "advantages": advantages,
    }


def compare(
    engine: ArchonEngine, name: str, batch: dict[str, torch.Tensor], steps: int
) -> list[Row]:
    logprobs: dict[bool, torch.Tensor] = {}
    for shares in (False, True):
        engine.shares_prefixes = shares
        logprobs[shares] = engine.forward_batch(batch)
    apart = (logprobs[True] - logprobs[False])[batch["loss_mask"]].abs().mean().item()
    batch = {**batch, "prox_logp": logprobs[False]}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    stats: dict[bool, dict[str, float]] = {}
    for step in range(steps + 1):
        for shares in seconds:
            engine.shares_prefixes = shares
            elapsed, stats[shares] = timed_step(engine, batch)
            if step:  # the first one warms up
                seconds[shares].append(elapsed)
    packed_s, tree_s = (statistics.median(seconds[shares]) for shares in (False, True))
    return [
        Row(name, packed_s / tree_s, "x, packed step over tree step"),
        Row(f"{name}_packed_s", packed_s, "s a step"),
        Row(f"{name}_tree_s", tree_s, "s a step"),
        Row(f"{name}_token_ratio", stats[True]["tree_token_ratio"], "of the tokens computed"),
        Row(f"{name}_logprob_difference", apart, "mean absolute"),
        Row(
            f"{name}_grad_norm_ratio",
            stats[True]["grad_norm"] / stats[False]["grad_norm"],
            "x, tree",
        ),
    ]


def timed_step(
    engine: ArchonEngine, batch: dict[str, torch.Tensor]
) -> tuple[float, dict[str, float]]:
    start = time.perf_counter()
    stats = engine.train_batch(batch, grpo_loss, lambda mb: mb["loss_mask"].sum())
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, stats


def grpo_loss(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, mb: dict[str, Any]):
    inputs = LossInputs(logprobs_T, mb["prox_logp"], mb["advantages"], mb["loss_mask"])
    return ppo_clip_loss(inputs, eps_clip=0.2)[0]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, TINY_SHAPE["vocab_size"]) for _ in range(count)]


if __name__ == "__main__":
    main()
