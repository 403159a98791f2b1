"""Tokens per second of Archon on one GPU, and the share of its matrix rate that is useful work.

    python benchmark/training.py [--rows ROW ...] [--json FILE] [--profile] [--tiny]

Random weights in the shape of Qwen2.5 1.5B (rows of `qwen3_5`: of Qwen3.5 0.8B, the smallest, and
2B), bfloat16, through `ArchonEngine.train_batch` with a
GRPO loss (forward, backward, clipping, AdamW on float32 masters) and `forward_batch`, compiled.

Useful work, in floating-point operations: 2 per token and weight of a matrix (the head is one, the
embedding none), 2 S^2 (heads x head dim) per layer for causal attention over S tokens, and for a
layer with the delta rule 6 (key dim x value dim) per token and head: what its definition reads,
corrects and writes of the state, not what chunks compute instead. Training
counts three times that (backward twice forward). What checkpointing computes again counts nothing.
The share is of the matrix rate measured in the same run (bf16, 8192^3).

| row           | work                                                                           |
|---------------|--------------------------------------------------------------------------------|
| 8x2048        | 8 sequences of 2048 tokens in one micro-batch                                  |
| 8x2048_fp8    | the same with archon.fp8_config.mode blockwise; 8x2048_fp8_speedup is tokens/s |
|               | over those of 8x2048 in the same run                                           |
| 4x8192_ckpt   | 4 of 8192, selective checkpointing (matrix products and attention are kept)    |
| 4x8192_full   | the same, full checkpointing: the inputs of blocks are kept                    |
| 1x32768_ckpt  | 1 of 32768, selective checkpointing                                            |
| 1x32768_full  | the same, full checkpointing                                                   |
| logprob_64k   | log-probabilities of 64k tokens of mixed lengths, no gradients                 |
| qwen3_5_0.8b_8x2048 | as 8x2048, 18 of the 24 layers with the gated delta rule                 |
| qwen3_5_0.8b_mixed  | 16384 tokens of mixed lengths in one micro-batch                         |
| qwen3_5_2b_8x2048   | as the first                                                             |
| peak_extra    | memory above weights, gradients, optimizer and activations in 1x32768_full;    |
|               | peak_extra_head is the part of the LM head, exactly                            |
| attention     | the ways to attend, alone: TFLOP/s forward and forward + backward              |

`--profile` prints the kernels of one step by their share of its time. `--tiny` shrinks everything,
to try the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attention_ways import attention_rows
from generation import SHAPES as MODELS
from report import Row, print_table, write_json

from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    ArchonFP8Config,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec
from areal.engine.train.archon import ArchonEngine
from areal.models.common.args import DecoderArgs
from areal.models.common.decoder import Decoder

SHAPE = MODELS["1.5b"] | {"hidden_act": "silu"}
_QWEN35 = MODELS["qwen3_5_0.8b"] | {"hidden_act": "silu"}
SHAPES = {
    "": SHAPE,
    "qwen3_5_0.8b": _QWEN35,
    "qwen3_5_2b": _QWEN35 | {"hidden_size": 2048, "intermediate_size": 6144},
}
TINY = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
TINY_QWEN35 = TINY | {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Work:
    lengths: tuple[int, ...]
    ac_mode: str | None = None
    trains: bool = True
    shape: str = ""
    fp8: bool = False


def _mixed_lengths(total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """A long tail of lengths, as answers have, that add up to `total`."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        drawn = torch.empty(1).log_normal_(7.0, 0.9, generator=generator).item()
        lengths.append(min(max(int(drawn), shortest), longest, total - sum(lengths)))
    return tuple(lengths)


WORKS = {
    "8x2048": Work((2048,) * 8),
    "8x2048_fp8": Work((2048,) * 8, fp8=True),
    "4x8192_ckpt": Work((8192,) * 4, "selective"),
    "4x8192_full": Work((8192,) * 4, "full"),
    "1x32768_ckpt": Work((32768,), "selective"),
    "1x32768_full": Work((32768,), "full"),
    "logprob_64k": Work(_mixed_lengths(65536, 128, 16384), trains=False),
    "qwen3_5_0.8b_8x2048": Work((2048,) * 8, shape="qwen3_5_0.8b"),
    "qwen3_5_0.8b_mixed": Work(_mixed_lengths(16384, 128, 8192), shape="qwen3_5_0.8b"),
    "qwen3_5_2b_8x2048": Work((2048,) * 8, shape="qwen3_5_2b"),
}
ROWS = [*WORKS, "peak_extra", "attention"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, metavar="ROW")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    parser.add_argument("--repeats", type=int, default=5, help="steps timed; the median counts")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sequences")
    args = parser.parse_args()
    rate = measure_matrix_rate(512 if args.tiny else 8192)
    rows = [Row("matrix_rate", rate / 1e12, "TFLOP/s")]
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows:
            if name == "peak_extra":  # comes with 1x32768_full
                continue
            is_work = name in WORKS
            if is_work:
                write_shape(Path(folder) / "config.json", WORKS[name].shape, tiny=args.tiny)
            found = measure(name, folder, rate, args) if is_work else attention_rows(tiny=args.tiny)
            print_table(found)
            rows += found
    rows += speedups(rows)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def write_shape(file: Path, name: str, *, tiny: bool) -> None:
    shape = SHAPES[name]
    if tiny:
        shape = shape | (TINY_QWEN35 if name else TINY)
    file.write_text(json.dumps(shape), encoding="utf-8")


def measure(name: str, folder: str, rate: float, args: argparse.Namespace) -> list[Row]:
    work = WORKS[name]
    if args.tiny:
        work = replace(work, lengths=tuple(max(length // 256, 2) for length in work.lengths))
    start = time.perf_counter()
    engine = open_engine(folder, work, compiled=not args.eager)
    batch = make_batch(work.lengths, engine.model.args.vocab_size)
    run = step_of(engine, work, batch)
    opened = time.perf_counter()
    run()
    run()
    warm = time.perf_counter()
    print(f"{name}: opened in {opened - start:.0f} s, first two steps in {warm - opened:.0f} s")
    reset_peak()
    seconds = median_seconds(run, args.repeats)
    tokens = sum(work.lengths)
    flop = useful_flop(engine, work)
    rows = [
        Row(name, tokens / seconds, "tokens/s"),
        Row(f"{name}_share", flop / seconds / rate, "of the matrix rate"),
        Row(f"{name}_peak", peak_bytes() / GIB, "GiB"),
    ]
    if name == "1x32768_full" and "peak_extra" in args.rows:
        rows.append(Row("peak_extra", peak_extra_bytes(engine, tokens) / GIB, "GiB"))
        rows.append(Row("peak_extra_head", head_bytes(engine, run) / GIB, "GiB"))
    if args.profile:
        print_profile(name, run)
    engine.destroy()
    return rows


def speedups(rows: list[Row]) -> list[Row]:
    rates = {row.name: row.value for row in rows}
    return [
        Row(f"{name}_speedup", rates[name] / rates[plain], f"times {plain}")
        for name in WORKS
        for plain in [name.removesuffix("_fp8")]
        if WORKS[name].fp8 and {name, plain} <= set(rates)
    ]


class DrawnEngine(ArchonEngine):
    """Its weights are drawn on the device: on the CPU each row would wait for them."""

    @torch.no_grad()
    def _fill(self, model: Decoder) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)


def open_engine(folder: str, work: Work, *, compiled: bool) -> ArchonEngine:
    config = TrainEngineConfig(
        path=folder,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=sum(work.lengths) if work.trains else 32768),
        optimizer=OptimizerConfig(lr=1e-6) if work.trains else None,
        gradient_checkpointing=work.ac_mode is not None,
        archon=ArchonEngineConfig(
            enable_compile=compiled,
            ac_mode=work.ac_mode or "none",
            fp8_config=ArchonFP8Config(mode="blockwise" if work.fp8 else "disabled"),
        ),
    )
    engine = DrawnEngine(config)
    engine.initialize(FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1))
    return engine


def make_batch(lengths: tuple[int, ...], vocab_size: int) -> dict[str, torch.Tensor]:
    """As the trainer has it: padded rows on the CPU. Every token is learned from, as little of a
    prompt as possible."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, vocab_size, mask.shape, generator=generator, dtype=torch.int32)
    loss_mask = mask & mask.roll(-1, 1)
    loss_mask[:, -1] = False
    old = torch.full(mask.shape, -12.0)
    advantages = torch.randn(len(lengths), 1, generator=generator).expand(mask.shape).contiguous()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "loss_mask": loss_mask,
        "prox_logp": old,
        "advantages": advantages,
    }


def grpo_loss(
    logprobs_T: torch.Tensor, entropy_T: torch.Tensor, mb: dict[str, Any]
) -> torch.Tensor:
    inputs = LossInputs(
        logprobs_T=logprobs_T,
        # The policy just before the update: every ratio is 1, and none is clipped away.
        prox_logp_T=logprobs_T.detach(),
        advantages_T=mb["advantages"],
        mask_T=mb["loss_mask"],
    )
    loss, _ = ppo_clip_loss(inputs, eps_clip=0.2)
    return loss


def step_of(engine: ArchonEngine, work: Work, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    if not work.trains:
        return lambda: engine.forward_batch(batch)
    return lambda: engine.train_batch(batch, grpo_loss, lambda mb: mb["loss_mask"].sum())


def useful_flop(engine: ArchonEngine, work: Work) -> float:
    args = engine.model.args
    body = sum(p.numel() for p in engine.model.layers.parameters() if p.ndim == 2)
    matrices = body + args.vocab_size * args.dim
    heads = len(args.attention_layers) * args.n_heads * args.head_dim
    attention = 2 * heads * sum(s * s for s in work.lengths)
    forward = 2 * matrices * sum(work.lengths) + attention + delta_flop(args) * sum(work.lengths)
    return (3 if work.trains else 1) * forward


def delta_flop(args: DecoderArgs) -> int:
    """Of one token in all layers with the delta rule."""
    if args.delta is None:
        return 0
    sizes = args.delta
    return 6 * len(sizes.layers) * sizes.num_value_heads * sizes.key_dim * sizes.value_dim


def peak_extra_bytes(engine: ArchonEngine, num_tokens: int) -> float:
    """The peak above what a step of full checkpointing has to hold at once.

    That is: weights and their gradients, float32 masters and moments; the inputs of all blocks; and
    the activations of the one block that is computed again.
    """
    model, args = engine.model, engine.model.args
    weights = sum(p.numel() for p in model.parameters())
    itemsize = next(model.parameters()).itemsize
    held = weights * (2 * itemsize + 3 * 4)
    inputs = (args.n_layers + 1) * num_tokens * args.dim * itemsize
    kv_width = 2 * args.n_kv_heads * args.head_dim
    # Input, normed, attention's and wo's output, residual; queries twice; gate, up, their product
    # and two of the gradients.
    widths = 5 * args.dim + 2 * args.n_heads * args.head_dim + kv_width + 5 * args.hidden_dim
    return peak_bytes() - held - inputs - num_tokens * widths * itemsize


def head_bytes(engine: ArchonEngine, run: Callable[[], None]) -> float:
    """The peak between the end of the last block and the first gradient of it, above its start."""
    marks: list[float] = []

    def enter(model: Decoder, inputs: object, hidden_TD: torch.Tensor) -> None:
        reset_peak()
        marks.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0.0)
        hidden_TD.register_hook(lambda grad: marks.append(peak_bytes()))

    hook = engine.model.register_forward_hook(enter)
    run()
    hook.remove()
    start, peak = marks
    return peak - start


def print_profile(name: str, run: Callable[[], None], top: int = 28) -> None:
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as prof:
        start = time.perf_counter()
        run()
        synchronize()
        wall = time.perf_counter() - start

    def microseconds(event) -> float:
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    events = sorted(prof.key_averages(), key=microseconds, reverse=True)
    busy = sum(microseconds(event) for event in events) / 1e6
    print(f"--- {name}: {1e3 * wall:.1f} ms, of which kernels {1e3 * busy:.1f} ms")
    for event in events[:top]:
        share = microseconds(event) / 1e6 / wall
        print(
            f"{share:6.1%} {microseconds(event) / 1e3:9.2f} ms {event.count:6d}x  {event.key[:110]}"
        )


def measure_matrix_rate(size: int) -> float:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=_device()) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, 20)


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> float:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0.0


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
