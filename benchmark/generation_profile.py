"""Where the time of generation goes on one GPU: by kind of work, beside the least it could take.

    python benchmark/generation_profile.py [--only LOAD ...] [--json FILE]

The loads are those of generation.py. Prefill is measured whole, decoding in steps around half of
the output, on the device alone (an idle device is generation.py's `_device_idle`). A kernel that
was started while the one before it ended counts from that end on, so the kinds add up to the time.

| kind        | the least it could take                                                            |
|-------------|------------------------------------------------------------------------------------|
| `matrix`    | products with the weights, at the matrix rate or the time to read the weights once |
| `attention` | decoding: keys and values read once; prefill: the products below the diagonal      |
| `states`    | decoding: those of recurrent layers read and written once; prefill: nothing        |
| `sampling`  | the float32 logits read once                                                       |
| `rest`      | nothing: norms, rotation, activation, embedding, bookkeeping                       |

`<load>/in_turn` is the speed if every kind took its least time one after the other; generation.py's
limit lets reading the cache hide behind arithmetic as well. `in_turn_sustained` is the same at the
matrix rate that the device holds for seconds, which may be far lower than at first.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from generation import (
    FP8_SUFFIX,
    LOADS,
    Ceilings,
    Load,
    body_weights,
    generate,
    measure_apart,
    measure_ceilings,
    random_model,
    request_options,
    shapes_of,
    square_product,
    warm_up,
)
from report import Row, print_table, write_json
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import GenRequest
from areal.engine.native.state_cache import state_bytes
from areal.models.common.args import DecoderArgs

KINDS = {
    "attention": r"_(decode|prompt|prefill)_kernel|PagedKVCache",  # the last: FlashInfer's
    "states": r"_(recur|convolve|gated_norm)_kernel|^(mix|solve|states|outputs)_kernel",
    "sampling": r"^(cut|race|finish)_kernel",
    "matrix": r"gemm|nvjet|cutlass|splitK|_skinny_kernel|_row_kernel|_rows_kernel|"
    r"_router_kernel|_expert_kernel|_gate_up_kernel|_down_kernel",
}
PROFILED_LAUNCHES = 4  # engine steps, each a few decode steps


@dataclass(frozen=True, slots=True)
class Work:
    """What a phase must do: bytes and operations by kind."""

    matrix_bytes: float
    matrix_flop: float
    cache_bytes: float
    attention_flop: float
    state_bytes: float
    logit_bytes: float

    def least_seconds(self, ceilings: Ceilings) -> dict[str, float]:
        def longer(num_bytes: float, flop: float) -> float:
            return max(num_bytes / ceilings.bytes_per_s, flop / ceilings.flop_per_s)

        return {
            "matrix": longer(self.matrix_bytes, self.matrix_flop),
            "attention": longer(self.cache_bytes, self.attention_flop),
            "states": self.state_bytes / ceilings.bytes_per_s,
            "sampling": self.logit_bytes / ceilings.bytes_per_s,
            "rest": 0.0,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for name, load in LOADS.items() if not load.has_tail]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="LOAD")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark/generation_profile.py needs a CUDA device", file=sys.stderr)
        return 1
    alone = len(shapes_of(args.only)) == 1
    rows = _run(args.only) if alone else measure_apart(__file__, args.only)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def _run(names: list[str]) -> list[Row]:
    (shape,) = shapes_of(names)
    fp8 = shape.endswith(FP8_SUFFIX)
    burst = measure_ceilings(fp8)
    sustained = replace(burst, flop_per_s=sustained_matrix_rate(fp8))
    engine = NativeEngine(random_model(shape), max_running=1024)
    rate = f"matrix_rate{FP8_SUFFIX * fp8}"
    return [
        Row("copy_bandwidth", burst.bytes_per_s / 1e12, "TB/s"),
        Row(rate, burst.flop_per_s / 1e12, "TFLOP/s"),
        Row(f"{rate}_sustained", sustained.flop_per_s / 1e12, "TFLOP/s"),
        *(row for name in names for row in profile_load(name, engine, burst, sustained)),
    ]


def sustained_matrix_rate(fp8: bool, seconds: float = 3.0) -> float:
    """Of the product that `measure_ceilings` times for a moment, without a break."""
    product = square_product(fp8)
    torch.cuda.synchronize()
    begin, num_products = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(100):
            product()
        torch.cuda.synchronize()
        num_products += 100
    return 2 * 8192**3 * num_products / (time.perf_counter() - begin)


def profile_load(
    name: str, engine: NativeEngine, burst: Ceilings, sustained: Ceilings
) -> list[Row]:
    load, args = LOADS[name], engine.model.args
    warm_up(engine, load)
    prefill = device_seconds(lambda: generate(engine, load.requests(num_out=1)))
    for i, (prompt, num_out) in enumerate(load.requests()):
        engine.add(GenRequest(str(i), prompt, request_options(num_out)))
    first = engine.stats()["tokens_generated"]
    step_until(engine, first + load.num_requests * load.num_out // 2)
    before = engine.stats()["tokens_generated"]
    decode = device_seconds(lambda: [engine.step() for _ in range(PROFILED_LAUNCHES)])
    num_steps = (engine.stats()["tokens_generated"] - before) / load.num_requests
    while engine.has_work:
        engine.step()
    decode = {kind: seconds / num_steps for kind, seconds in decode.items()}
    num_bytes = 1 if engine.model.has_fp8_cache else 2  # of a number in the blocks and the cache
    works = prefill_work(args, load, num_bytes), decode_work(args, load, num_bytes)
    least, least_sustained = ([w.least_seconds(c) for w in works] for c in (burst, sustained))
    return [
        *_rows(f"{name}/prefill", "ms", prefill, least[0]),
        *_rows(f"{name}/decode", "ms a step", decode, least[1]),
        _speed(f"{name}/in_turn", load, *least),
        _speed(f"{name}/in_turn_sustained", load, *least_sustained),
        _speed(f"{name}/measured", load, prefill, decode),
    ]


def step_until(engine: NativeEngine, num_tokens: int) -> None:
    while engine.stats()["tokens_generated"] < num_tokens:
        engine.step()


def device_seconds(work: Callable[[], object]) -> dict[str, float]:
    """Time of the device by kind of kernel, overlaps counted once."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    seconds = dict.fromkeys([*KINDS, "rest"], 0.0)
    last_end = 0.0
    for start, end, name in spans:
        seconds[kind_of(name)] += max(0.0, end - max(start, last_end)) / 1e6
        last_end = max(last_end, end)
    return seconds


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel)), "rest")


def prefill_work(args: DecoderArgs, load: Load, num_bytes: int) -> Work:
    num_rows, head = load.prompts * load.num_in, args.dim * args.vocab_size
    read, used = body_weights(args, num_rows)
    # Of a row at position p a layer reads min(p + 1, window) keys.
    short = [min(window, load.num_in) for window in windows(args)]
    pairs = load.prompts * sum(n * (n + 1) / 2 + (load.num_in - n) * n for n in short)
    return Work(
        matrix_bytes=num_bytes * read,
        matrix_flop=2 * used * num_rows + 2 * head * load.num_requests,
        cache_bytes=0.0,
        attention_flop=4 * pairs * args.n_heads * args.head_dim,
        state_bytes=0.0,
        logit_bytes=4.0 * load.num_requests * args.vocab_size,
    )


def windows(args: DecoderArgs) -> list[int]:
    """How many tokens each layer with attention sees at most."""
    return [args.window(layer) or sys.maxsize for layer in args.attention_layers]


def decode_work(args: DecoderArgs, load: Load, num_bytes: int) -> Work:
    """Of a step at half of the output: the mean over all steps."""
    head = args.dim * args.vocab_size
    read, used = body_weights(args, load.num_requests)
    length = load.num_in + load.num_out / 2
    cached = load.num_requests * sum(min(length, window) for window in windows(args))
    return Work(
        matrix_bytes=num_bytes * read + 2 * head,
        matrix_flop=2 * (used + head) * load.num_requests,
        cache_bytes=cached * 2 * num_bytes * args.n_kv_heads * args.head_dim,
        attention_flop=4 * cached * args.n_heads * args.head_dim,
        state_bytes=2 * load.num_requests * (state_bytes(args, 2) if args.delta else 0),
        logit_bytes=4.0 * load.num_requests * args.vocab_size,
    )


def _rows(name: str, unit: str, measured: dict[str, float], least: dict[str, float]) -> list[Row]:
    rows = []
    for kind, seconds in measured.items():
        rows.append(Row(f"{name}/{kind}", 1e3 * seconds, unit))
        rows.append(Row(f"{name}/{kind}_least", 1e3 * least[kind], unit))
    return rows


def _speed(name: str, load: Load, prefill: dict[str, float], step: dict[str, float]) -> Row:
    seconds = sum(prefill.values()) + load.num_out * sum(step.values())
    return Row(name, load.num_requests * load.num_out / seconds, "tokens/s")


if __name__ == "__main__":
    sys.exit(main())
