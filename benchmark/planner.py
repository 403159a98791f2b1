"""How near are the planner's predictions to what was measured?

    python benchmark/planner.py [--json FILE]

Compares `areal plan`'s models with benchmark/results: training, generation, memory on one H200, and
asynchronous against synchronous runs on a CPU. The profiles were fitted to some of these rows
(`FITTED`, `fitted` in the table), whose agreement shows little; the others are held out. The goal
of a row of throughput or a speed-up is 15 %, that of memory 5 % above and 2 % below; the exit code
is 1 if a row misses its goal.

Most rows of memory, and rows of other shapes, are those of benchmark/planner_rows.py, measured for
this comparison on one H200. No layout of several GPUs has been measured, neither memory nor speed.

The CPU rows are those of async_speedup.py, simulated (`areal.planner.simulate`). They are fitted:
how much trainer and server slow each other down on two cores was chosen to bring the three
speed-ups near what was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from generation import CHATS, FP8_SUFFIX, LOADS, NUM_TURNS, SHAPES, TURN_TOKENS
from planner_rows import ROWS, predict
from report import Row, write_json
from training import SHAPE, WORKS, Work

from areal.models import decoder_args
from areal.planner.devices import GIB, load_device
from areal.planner.memory import TrainingRank
from areal.planner.shapes import Shape
from areal.planner.simulate import Spec, simulate
from areal.planner.speed import Generation, Training
from areal.planner.workload import Workload
from areal.utils.seqpack import pack_sequences

RESULTS = Path(__file__).parent / "results"
H200, CPU = load_device("h200"), load_device("cpu")
# Rows by which the profiles and formulas were made, so that they prove nothing. 7b_1024_256_512 and
# 7b_64 gave the form of the model: their profile by kind of kernel was read to write it.
FITTED = {
    "8x2048",
    "tree_16x2k_packed",
    "1.5b_1",
    "1.5b_64_256_256",
    "7b_1",
    "7b_64",
    "7b_1024_256_512",
    "7b_1_fp8",
    "7b_1024_256_512_fp8",
    "30b_a3b_1",
    "rl_staleness_2",
    "qwen3_5_0.8b_256_512_512",  # its profile says how fast states are read
    # Of uncompiled steps: the first rows of planner_rows.py, by which their speed was understood.
    "train_0.5b_4x4096",
    "train_3b_4x4096_full",
    "train_1.5b_2x6144_selective",
    "train_7b_lora_4x4096_full",
    "train_0.5b_float32_2x2048",
    "train_gemma3_1b_4x2048_selective",
    "train_llama_1b_3_batches",
    "train_moe_4b_4x2048_full",
    "train_deepseek_4x2048_full",
    "train_qwen3.5_2b_4x2048",
    "train_qwen3_1.7b_8x1024",
    "train_0.5b_float32_2x2048_peak",
    "forward_3b_16x2048_peak",
    "8x2048_peak",
    "4x8192_ckpt_peak",
    "4x8192_full_peak",
    "logprob_64k_peak",
    "demo_staleness_0",
    "tail_staleness_0",
    "env_staleness_0",
    "speedup_demo",
    "speedup_tail",
    "speedup_env",
}
# The model of `areal demo`, and the tokens its answers have.
DEMO = {
    "model_type": "qwen3",
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
DEMO_PROMPT, DEMO_OUTPUT, DEMO_MAX_OUTPUT = 6, 7.16, 10
ENVIRONMENT_S = 0.125  # 50 to 200 ms
SIMULATED_STEPS = 48  # as many as benchmark/async_speedup.py runs, warm-up included


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_fitted(self) -> bool:
        return self.name in FITTED

    @property
    def is_met(self) -> bool:
        if self.unit == "GiB":
            return -0.02 <= self.error <= 0.05
        return abs(self.error) <= 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    compared = list(comparisons())
    for row in compared:
        kind = "fitted" if row.is_fitted else "held out"
        met = "" if row.is_met else "  MISSED"
        print(
            f"{row.name:<28} {row.predicted:>12.4g} {row.measured:>12.4g} {row.unit:<9} "
            f"{row.error:>+7.1%}  {kind}{met}"
        )
    held_out = [row for row in compared if not row.is_fitted]
    missed = [row for row in compared if not row.is_met]
    num_met = sum(row.is_met for row in held_out)
    print(f"{len(held_out)} rows held out, {num_met} within their goal; {len(missed)} rows missed")
    if args.json:
        rows = [Row(row.name, row.error, "predicted / measured - 1") for row in compared]
        more = {"fitted": sorted(FITTED), "missed": [row.name for row in missed]}
        write_json(args.json, rows, **more)
    return 1 if missed else 0


def comparisons() -> Iterator[Comparison]:
    yield from training_rows()
    yield from generation_rows()
    yield from loop_rows()
    yield from memory_rows()
    yield from measured_rows()
    yield from cpu_rows()


def results(name: str) -> dict[str, float]:
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {row["name"]: row["value"] for row in content["rows"]}


def qwen() -> Shape:
    return Shape(decoder_args(SHAPE))


def plain_works() -> list[tuple[str, Work]]:
    """Without FP8, which has no factor yet, and other shapes, which have rows of their own."""
    return [(name, work) for name, work in WORKS.items() if not (work.fp8 or work.shape)]


def training_rows() -> Iterator[Comparison]:
    measured = results("training")
    for name, work in plain_works():
        engine = Training(
            shape=qwen(),
            device=H200,
            compiled=True,
            recompute="full" if work.ac_mode == "full" else "none",
        )
        seconds = engine.micro_batch_s(work.lengths, trains=work.trains)
        seconds += engine.optimizer_s() if work.trains else 0.0
        yield Comparison(name, sum(work.lengths) / seconds, measured[name], "tokens/s")
    trees = results("tree_training")
    batches = {
        "16x2k": [2048 + 512] * 16,
        "agent_4x8": [1024 + 512 * turn for turn in range(1, 9)] * 4,
    }
    for name, lengths in batches.items():
        engine = Training(shape=qwen(), device=H200)
        measured_s = trees[f"tree_speedup_{name}_packed_s"]
        rate = sum(lengths) / step_s(engine, lengths, 16384)
        yield Comparison(f"tree_{name}_packed", rate, sum(lengths) / measured_s, "tokens/s")


def step_s(engine: Training, lengths: list[int], max_tokens: int) -> float:
    bins = pack_sequences(lengths, max_tokens=max_tokens, min_bins=1, algorithm="ffd")
    batches = ([lengths[row] for row in rows] for rows in bins)
    return sum(map(engine.micro_batch_s, batches)) + engine.optimizer_s()


def generation_rows() -> Iterator[Comparison]:
    others = (f"generation_{kind}" for kind in ("fp8", "wide", "turns", "more", "hybrid"))
    measured = results("generation") | {
        name: value
        for file in others
        for name, value in results(file).items()
        if name not in results("generation")
    }
    for name, load in LOADS.items():
        engine = server(load.shape)
        lengths = load.lengths()
        rate = sum(lengths) / engine.batch_s(lengths, load.num_in, load.prompts)
        yield Comparison(name, rate, measured[name], "tokens/s")
    name = "1.5b_turns_128x6"
    yield Comparison(name, turns_rate(), measured[name], "tokens/s")


def server(shape: str) -> Generation:
    hf_config = SHAPES[shape.removesuffix(FP8_SUFFIX)]
    is_fp8 = shape.endswith(FP8_SUFFIX)
    return Generation(shape=Shape(decoder_args(hf_config)), device=H200, is_fp8=is_fp8)


def turns_rate() -> float:
    """Dialogues: of each later prompt, what was computed before is in the cache."""
    engine, seconds = server(CHATS.shape), 0.0
    for turn in range(NUM_TURNS):
        whole = CHATS.num_in + turn * (CHATS.num_out + TURN_TOKENS)
        new = whole if turn == 0 else TURN_TOKENS + 16  # from the first page that is not full
        seconds += engine.prefill_s(CHATS.prompts * new, whole, whole - new)
        steps = engine.step_of_s(CHATS.prompts, whole, CHATS.num_out / 2, CHATS.prompts)
        seconds += CHATS.num_out * steps
    return CHATS.prompts * CHATS.num_out * NUM_TURNS / seconds


def loop_rows() -> Iterator[Comparison]:
    """benchmark/rl_single_gpu.py: 16 prompts of 256 tokens, 16 answers of 512 each."""
    measured = results("rl_single_gpu")
    tokens = 256 * (256 + 512)
    generate_s = server("1.5b").batch_s([512] * 256, 256, 16)
    train_s = step_s(Training(shape=qwen(), device=H200, compiled=True), [768] * 256, 32768)
    rates = {
        "generate_alone": tokens / generate_s,
        "train_alone": tokens / train_s,
        "staleness_0": tokens / (generate_s + train_s),
        "staleness_2": tokens / (generate_s + train_s) * 2 * H200.training_beside,
    }
    for name, rate in rates.items():
        yield Comparison(f"rl_{name}", rate, measured[name], "tokens/s")


def memory_rows() -> Iterator[Comparison]:
    measured = results("training")
    for name, work in plain_works():
        rank = TrainingRank(
            shape=qwen(),
            device=H200,
            tokens=min(sum(work.lengths), 32768),
            mode="full" if work.ac_mode == "full" else "compiled",
            is_compiled=True,
            trains=work.trains,
        )
        peak = rank.memory("actor").peak / GIB
        yield Comparison(f"{name}_peak", peak, measured[f"{name}_peak"], "GiB")


def measured_rows() -> Iterator[Comparison]:
    """Those of benchmark/planner_rows.py, memory and speed."""
    measured = results("planner_rows") | results("planner_rows_servers")
    for name in ROWS:
        for row in predict(name):
            if row.name in measured:
                yield Comparison(row.name, row.value, measured[row.name], row.unit)


def cpu_rows() -> Iterator[Comparison]:
    measured = results("async_speedup")
    for load in ("demo", "tail", "env"):
        rates = {eta: cpu_rate(load, eta) for eta in (0, 2)}
        name = f"{load}_staleness_0"
        yield Comparison(name, rates[0], measured[name], "tokens/s")
        name = f"speedup_{load}"
        yield Comparison(name, rates[2] / rates[0], measured[name], "x")


def cpu_rate(name: str, staleness: int) -> float:
    """Tokens trained per second, simulated."""
    shape = Shape(decoder_args(DEMO))
    load = Workload(
        prompts=64 if name == "demo" else 16,
        samples=4 if name == "tail" else 8,
        prompt=DEMO_PROMPT,
        output=DEMO_OUTPUT,
        max_output=DEMO_MAX_OUTPUT,
        spread=0.3,
        staleness=staleness,
        environment_s=ENVIRONMENT_S if name == "env" else 0.0,
    )
    draw = None
    if name == "tail":
        load, draw = replace(load, output=27.6, max_output=200), pareto
    generation = Generation(shape=shape, device=CPU, itemsize=4)
    training = Training(shape=shape, device=CPU, itemsize=4)
    lengths = [load.prompt + load.output] * load.num_samples
    train_s = training.micro_batch_s(lengths) + training.optimizer_s()
    spec = Spec(
        load=load,
        num_servers=1,
        max_running=512,
        step_s=lambda rows: generation.step_s(rows, rows * (load.prompt + load.output / 2)),
        prefill_s=generation.prefill_s(load.prompt, load.prompt),
        recompute_s=generation.prefill_s(load.prompt + load.output / 2, load.prompt),
        train_s=train_s + CPU.sample_us * 1e-6 * load.num_samples,
        publish_s=0.02,
        stall_s=CPU.update_ms * 1e-3,
        generates_at=CPU.generation_beside,
        trains_at=CPU.training_beside,
        draw=draw,
    )
    return simulate(spec, steps=SIMULATED_STEPS, seed=1).tokens_per_s


def pareto(uniform: float) -> int:
    """As TailWorkflow of benchmark/async_speedup.py draws."""
    return min(4 + int(max(1 - uniform, 1e-9) ** (-1 / 1.1) * 6), 200)


if __name__ == "__main__":
    sys.exit(main())
