"""Rows measured for benchmark/planner.py: what a config predicts, and what a GPU did.

    python benchmark/planner_rows.py [--rows ROW ...] [--json FILE] [--seconds S]     # on a GPU
    python benchmark/planner_rows.py --predict [--rows ROW ...]                       # anywhere

A row of `TRAININGS` is a section of a config and a batch: the peak of a step (`NAME_peak`) and its
tokens per second (`NAME`). A row of `SERVERS` is a native server and some loads: the peak over all
of them, and output tokens per second of each. Weights are random. Peaks are what torch has
allocated; nothing of a process that torch does not allocate is in them. After S seconds no further
row is begun. A row that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generation import SHAPES, Load, generate
from report import Row, write_json
from training import (
    GIB,
    SHAPE,
    DrawnEngine,
    Work,
    make_batch,
    median_seconds,
    peak_bytes,
    reset_peak,
    step_of,
)

from areal.api.config.train_engine import (
    ArchonEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec
from areal.planner.devices import load_device
from areal.planner.engines import shape_of, trainer_of
from areal.planner.memory import ServerRank
from areal.planner.speed import Generation
from areal.utils.seqpack import pack_sequences

H200 = load_device("h200")


def _dense(dim: int, width: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict:
    return SHAPE | {
        "hidden_size": dim,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "0.5b": _dense(896, 4864, 24, 14, 2),
    "1.5b": SHAPE,
    "3b": _dense(2048, 11008, 36, 16, 2),
    "7b": SHAPES["7b"] | {"hidden_act": "silu"},
    "qwen3_0.6b": _dense(1024, 3072, 28, 16, 8, model_type="qwen3", head_dim=128),
    "qwen3_1.7b": _dense(2048, 6144, 28, 16, 8, model_type="qwen3", head_dim=128),
    "qwen3_4b": _dense(2560, 9728, 36, 32, 8, model_type="qwen3", head_dim=128),
    "llama_1b": _dense(2048, 8192, 16, 32, 8, model_type="llama", vocab_size=128256),
    "llama_8b": _dense(
        4096, 14336, 32, 32, 8, model_type="llama", vocab_size=128256, tie_word_embeddings=False
    ),
    "gemma3_1b": SHAPES["gemma3_1b"],
    "moe_4b": SHAPES["30b_a3b"]
    | {"num_hidden_layers": 12, "num_experts": 64, "hidden_act": "silu"},
    "deepseek": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "max_position_embeddings": 16384,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "qwen3.5_2b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, slots=True)
class TrainingRow:
    model: str
    lengths: tuple[int, ...]
    ac_mode: str | None = None
    max_tokens: int | None = None  # of a micro-batch
    compiled: bool = False
    trains: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # of the section

    def section(self, path: str = "model") -> TrainEngineConfig:
        return TrainEngineConfig(
            path=path,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=self.max_tokens),
            gradient_checkpointing=self.ac_mode is not None,
            archon=ArchonEngineConfig(enable_compile=self.compiled, ac_mode=self.ac_mode or "none"),
            **{"optimizer": OptimizerConfig(lr=1e-6) if self.trains else None, **self.options},
        )

    @property
    def bins(self) -> list[list[int]]:
        """Lengths of each micro-batch."""
        total = self.max_tokens or sum(self.lengths)
        packed = pack_sequences(list(self.lengths), max_tokens=total, min_bins=1, algorithm="ffd")
        return [[self.lengths[i] for i in rows] for rows in packed]


LORA = {"use_lora": True, "lora_rank": 32}
SGD = {"optimizer": OptimizerConfig(type="sgd", lr=1e-6)}
TRAININGS: dict[str, TrainingRow] = {
    "train_0.5b_4x4096": TrainingRow("0.5b", (4096,) * 4),
    "train_3b_4x4096_full": TrainingRow("3b", (4096,) * 4, "full"),
    "train_1.5b_2x6144_selective": TrainingRow("1.5b", (6144,) * 2, "selective"),
    "train_7b_lora_4x4096_full": TrainingRow("7b", (4096,) * 4, "full", options=LORA),
    "train_0.5b_float32_2x2048": TrainingRow("0.5b", (2048,) * 2, options={"dtype": "float32"}),
    "train_gemma3_1b_4x2048_selective": TrainingRow("gemma3_1b", (2048,) * 4, "selective"),
    "train_llama_1b_3_batches": TrainingRow("llama_1b", (3000,) * 12, max_tokens=12288),
    "train_moe_4b_4x2048_full": TrainingRow("moe_4b", (2048,) * 4, "full"),
    "train_deepseek_4x2048_full": TrainingRow("deepseek", (2048,) * 4, "full"),
    "train_qwen3.5_2b_4x2048": TrainingRow("qwen3.5_2b", (2048,) * 4, "full"),
    "forward_3b_16x2048": TrainingRow("3b", (2048,) * 16, max_tokens=16384, trains=False),
    "train_qwen3_1.7b_8x1024": TrainingRow("qwen3_1.7b", (1024,) * 8),
    "train_0.5b_8x4096_compiled": TrainingRow("0.5b", (4096,) * 8, compiled=True),
    "train_qwen3_4b_6x2048_full": TrainingRow("qwen3_4b", (2048,) * 6, "full"),
    "train_qwen3_0.6b_1x16384_selective": TrainingRow("qwen3_0.6b", (16384,), "selective"),
    "train_llama_1b_6x4096_selective": TrainingRow("llama_1b", (4096,) * 6, "selective"),
    "train_llama_8b_lora_2x4096_selective": TrainingRow(
        "llama_8b", (4096,) * 2, "selective", options=LORA
    ),
    "train_7b_sgd_2x4096_full": TrainingRow("7b", (4096,) * 2, "full", options=SGD),
    "train_1.5b_float32_2x4096_full": TrainingRow(
        "1.5b", (4096,) * 2, "full", options={"dtype": "float32"}
    ),
    "train_0.5b_4_batches_selective": TrainingRow(
        "0.5b", (1500,) * 32, "selective", max_tokens=12288
    ),
    "train_gemma3_1b_1x8192": TrainingRow("gemma3_1b", (8192,)),
    "train_moe_4b_2x4096": TrainingRow("moe_4b", (4096,) * 2),
    "train_qwen3.5_2b_6x1024": TrainingRow("qwen3.5_2b", (1024,) * 6),
    "train_deepseek_2x2048": TrainingRow("deepseek", (2048,) * 2),
    "forward_7b_8x2048": TrainingRow("7b", (2048,) * 8, trains=False),
    "train_qwen3_1.7b_4x4096_compiled": TrainingRow("qwen3_1.7b", (4096,) * 4, compiled=True),
}


@dataclass(frozen=True, slots=True)
class ServerRow:
    model: str
    loads: tuple[Load, ...]
    is_fp8: bool = False
    num_pages: int = 20000
    max_running: int = 512
    page_size: int = 16


SERVERS: dict[str, ServerRow] = {
    "serve_0.5b": ServerRow(
        "0.5b", (Load("", 256, 256, 256), Load("", 64, 1024, 256)), num_pages=12000, max_running=256
    ),
    "serve_3b": ServerRow("3b", (Load("", 256, 256, 256), Load("", 32, 512, 256)), num_pages=24000),
    "serve_3b_fp8": ServerRow("3b", (Load("", 256, 256, 256),), is_fp8=True, num_pages=48000),
    "serve_qwen3_4b": ServerRow(
        "qwen3_4b", (Load("", 128, 512, 256), Load("", 512, 256, 128)), num_pages=30000
    ),
    "serve_llama_8b_fp8": ServerRow(
        "llama_8b", (Load("", 256, 256, 256),), is_fp8=True, num_pages=16000, max_running=256
    ),
    "serve_gemma3_1b": ServerRow(
        "gemma3_1b", (Load("", 128, 256, 512),), num_pages=9000, max_running=128
    ),
    "serve_deepseek": ServerRow(
        "deepseek", (Load("", 32, 256, 64), Load("", 64, 256, 64)), num_pages=4000
    ),
    "serve_qwen3.5_2b": ServerRow("qwen3.5_2b", (Load("", 32, 128, 64),), num_pages=4000),
}
ROWS = [*TRAININGS, *SERVERS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, metavar="ROW")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S")
    parser.add_argument("--predict", action="store_true", help="print predictions, and end")
    args = parser.parse_args()
    if args.predict:
        for name in args.rows:
            for row in predict(name):
                print(f"{row.name:<44} {row.value:>12.2f} {row.unit}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("benchmark/planner_rows.py needs a CUDA device: none was found", file=sys.stderr)
        return 1
    start, rows = time.monotonic(), []
    for name in args.rows:
        if time.monotonic() - start > args.seconds:
            print(f"{name}: no time left")
            continue
        rows += _measured(name)
        print(f"  after {time.monotonic() - start:.0f} s", flush=True)
        if args.json:
            write_json(args.json, rows)
    return 0


def predict(name: str) -> Iterator[Row]:
    """What the planner says of a row, under the names of what is measured."""
    if name in TRAININGS:
        yield from _predict_training(name, TRAININGS[name])
    else:
        yield from _predict_server(name, SERVERS[name])


def _predict_training(name: str, row: TrainingRow) -> Iterator[Row]:
    trainer = trainer_of(row.section(), MODELS[row.model], H200)
    bins = row.bins
    rank = dataclasses.replace(
        trainer.rank,
        tokens=max(map(sum, bins)),
        longest=max(row.lengths),
        num_micro_batches=len(bins),
    )
    yield Row(f"{name}_peak", rank.memory("").peak / GIB, "GiB")
    seconds = sum(trainer.training.micro_batch_s(one, trains=row.trains) for one in bins)
    seconds += trainer.training.optimizer_s() if row.trains else 0.0
    yield Row(name, sum(row.lengths) / seconds, "tokens/s")


def _predict_server(name: str, row: ServerRow) -> Iterator[Row]:
    shape = shape_of(MODELS[row.model])
    rank = ServerRank(
        shape=shape,
        device=H200,
        is_fp8=row.is_fp8,
        page_size=row.page_size,
        num_pages=row.num_pages,
        max_running=row.max_running,
    )
    yield Row(f"{name}_peak", rank.memory("").peak / GIB, "GiB")
    generation = Generation(shape=shape, device=H200, is_fp8=row.is_fp8)
    for load in row.loads:
        lengths = load.lengths()
        seconds = generation.batch_s(lengths, load.num_in, load.prompts)
        yield Row(_load_name(name, load), sum(lengths) / seconds, "tokens/s")


def _load_name(name: str, load: Load) -> str:
    return f"{name}_{load.prompts}_{load.num_in}_{load.num_out}"


def _measured(name: str) -> list[Row]:
    """Beside what is predicted, printed."""
    import torch

    measure = _measure_training if name in TRAININGS else _measure_server
    try:
        rows = measure(name)
    except Exception as error:  # boundary: of a machine that is lent, other rows are still wanted
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
        rows = []
    gc.collect()
    torch.cuda.empty_cache()
    try:
        expected = {row.name: row.value for row in predict(name)}
    except ValueError as error:
        expected = {}
        print(f"{name}: not planned: {error}")
    for row in rows:
        guess = expected.get(row.name)
        text = "" if guess is None else f"predicted {guess:.2f} {guess / row.value - 1:+.1%}"
        print(f"{row.name:<44} {row.value:>12.2f} {row.unit:<9} {text}", flush=True)
    return rows


def _measure_training(name: str) -> list[Row]:
    row = TRAININGS[name]
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_text(json.dumps(MODELS[row.model]), encoding="utf-8")
        engine = DrawnEngine(row.section(folder))
        engine.initialize(FinetuneSpec(total_train_epochs=1, dataset_size=99, train_batch_size=1))
    batch = make_batch(row.lengths, MODELS[row.model]["vocab_size"])
    run = step_of(engine, Work(row.lengths, trains=row.trains), batch)
    run()
    run()
    reset_peak()
    seconds = median_seconds(run, 3)
    peak = peak_bytes() / GIB
    engine.destroy()
    return [
        Row(f"{name}_peak", peak, "GiB"),
        Row(name, sum(row.lengths) / seconds, "tokens/s"),
    ]


def _measure_server(name: str) -> list[Row]:
    import torch

    from areal.engine.native.engine import NativeEngine

    row = SERVERS[name]
    engine = NativeEngine(
        _random_model(MODELS[row.model], row.is_fp8),
        num_pages=row.num_pages,
        page_size=row.page_size,
        max_running=row.max_running,
    )
    gc.collect()
    rows, peaks = [], []
    for load in row.loads:
        reset_peak()
        generate(engine, load.requests(num_out=12))
        peaks.append(peak_bytes())
        seconds = []
        for _ in range(2):  # the first may still compile something
            # Prompts are computed again. What this copies of FP8 weights is no part of a server.
            weights = engine.model.named_hf_tensors()
            engine.load_weights(weights, engine.version + 1, recompute_kv=True)
            reset_peak()
            seconds.append(generate(engine, load.requests()))
            peaks.append(peak_bytes())
        assert not engine.stats()["preemptions"], "the cache is too small for this load"
        rows.append(Row(_load_name(name, load), sum(load.lengths()) / min(seconds), "tokens/s"))
        print(f"  {name}: {seconds[0]:.2f} s, {seconds[1]:.2f} s")
    print(f"  {name}: torch has reserved {torch.cuda.memory_reserved() / GIB:.2f} GiB")
    return [Row(f"{name}_peak", max(peaks) / GIB, "GiB"), *rows]


def _random_model(hf_config: Mapping[str, Any], is_fp8: bool) -> Any:
    import torch

    from areal.models.common.fp8 import FP8
    from areal.models.hf_io import build_model

    model = build_model(hf_config, device="cuda", dtype=FP8 if is_fp8 else torch.bfloat16)
    norm = 0.0 if model.args.zero_centered_norms else 1.0
    for name, size in model.hf_shapes().items():
        weight = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        if "norm" in name:
            weight.fill_(norm)
        else:
            weight.normal_(0.0, 0.02)
        model.load_hf_tensor(name, weight)
    return model


if __name__ == "__main__":
    sys.exit(main())
