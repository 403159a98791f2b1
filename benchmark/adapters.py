"""Generation with many LoRA adapters in one batch on a GPU, as a share of the speed without any.

    python benchmark/adapters.py [--rank 16] [--json FILE]

The shape and the loads of benchmark/generation.py (1.5B, 64 and 512 requests of 256 tokens in and
256 out), on one engine in one run: first plain, then each request with the next of 1, 8 and 32
adapters, which change all seven projections of every layer.
"""

from __future__ import annotations

import argparse
import sys

import torch
from generation import Load, generate, random_model, run, warm_up
from report import Row, print_table, write_json

from areal.engine.native.adapters import read_adapter
from areal.engine.native.engine import NativeEngine
from areal.models.common.decoder import Decoder

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOADS = {"1.5b_64": Load("1.5b", 64, 256, 256), "1.5b_512": Load("1.5b", 512, 256, 256)}
COUNTS = (1, 8, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark/adapters.py needs a CUDA device; none was found", file=sys.stderr)
        return 1
    engine = NativeEngine(random_model("1.5b"), max_running=512)
    rows = measure(engine, args.rank)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def measure(engine: NativeEngine, rank: int) -> list[Row]:
    rows, plain_s = [], {}
    for name, load in LOADS.items():
        warm_up(engine, load)
        plain_s[name] = generate(engine, load.requests())
        rows.append(Row(name, load.num_requests * load.num_out / plain_s[name], "tokens/s"))
    for count in COUNTS:
        while len(engine.adapters.names) < count:
            add_adapter(engine, len(engine.adapters.names), rank)
        names = engine.adapters.names
        for name, load in LOADS.items():
            run(engine, load.requests(num_out=12), names)  # captures graphs, compiles
            weights = engine.model.named_hf_tensors()  # the same: prompts are forgotten
            engine.load_weights(weights, engine.version + 1, recompute_kv=True)
            seconds = generate(engine, load.requests(), names)
            unit = "of the speed without adapters"
            rows.append(Row(f"{name}_adapters_{count}", plain_s[name] / seconds, unit))
    return rows


def add_adapter(engine: NativeEngine, seed: int, rank: int) -> None:
    tensors = adapter_tensors(engine.model, seed, rank)
    adapter = read_adapter(engine.model, tensors.items(), alpha=2.0 * rank)
    engine.adapters.add(f"adapter-{seed}", adapter)


def adapter_tensors(model: Decoder, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Small random ones under their names in peft's files."""
    device = model.embedding_weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in model.hf_shapes().items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in TARGETS:
            for matrix, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                values = torch.randn(size, generator=generator, device=device)
                tensors[f"{layer}.lora_{matrix}.weight"] = 0.01 * values
    return tensors


if __name__ == "__main__":
    sys.exit(main())
