"""How fast the attention kernels are, against what the device's memory or arithmetic allows.

    python benchmark/attention_kernels.py [--only NAME] [--defaults] [--json FILE]

Needs one CUDA device. Each case is run with the launch shape the engine takes for it (`default`)
and, without `--defaults`, with others, so that one run says which is best. A launch is timed inside
a CUDA graph that goes through the caches of many layers, so that none is still in the device's own
cache when its turn comes; the median of 20 replays counts.

| rows               | work                                                                       |
|--------------------|----------------------------------------------------------------------------|
| `decode_*`         | rows x cached tokens, 1.5B shape (12 heads on 2, 128), 7B (28 on 4, 128) or |
|                    | Gemma 3 1B (4 on 1, 256)                                                   |
| `decode_tail`      | 512 rows, lengths from a long tail: mean 1k, at most 8k                    |
| `decode_groups*`   | 512 rows, 16 to a prompt of 2048 (8192) that they read together, and 512   |
|                    | tokens of their own                                                        |
| `decode_*_alone`   | the same when every row reads its prompt itself                            |
| `prefill_*`        | prompts x tokens, 1.5B shape, 7B or Gemma 3 1B                             |
| `prefill_*_rows`   | the same by `rows_attention`, the price of batch-invariant numerics        |
| `*_flashinfer`     | the same by FlashInfer, where it is installed                              |
| `*_share`          | decode: keys and values (a prompt's once) over time, of copy bandwidth     |
| `*_tflops`         | prefill: operations below the diagonal over time                           |
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from generation import measure_ceilings
from report import Row, print_table, write_json
from triton.runtime.errors import OutOfResources

from areal.engine.native.cuda import decode_attention as decode
from areal.engine.native.cuda import prefill_attention as prefill
from areal.engine.native.cuda.device import device_of
from areal.engine.native.cuda.prefill_attention import FlashInferPrefill, flashinfer_prefill
from areal.engine.native.cuda.prompt_attention import prompt_attention
from areal.engine.native.cuda.shared_prompts import (
    Heads,
    PromptSpace,
    SharedPrompts,
    share_prompts,
)

PAGE_SIZE = 16
COLD_BYTES = 512 * 2**20  # caches a graph goes through: several times the device's own cache
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    lengths: Sequence[int]
    num_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 128
    samples: int = 1  # rows of one prompt, one after the other
    prompt: int = 0  # leading tokens of it

    @property
    def cache_bytes(self) -> int:
        again = len(self.lengths) // self.samples * (self.samples - 1) * self.prompt
        return 4 * (sum(self.lengths) - again) * self.num_kv_heads * self.head_dim

    @property
    def causal_flop(self) -> int:
        return sum(2 * self.num_heads * self.head_dim * n * (n + 1) for n in self.lengths)


@dataclass(frozen=True, slots=True)
class Variant:
    """One launch shape of one case."""

    case: str
    label: str
    run: Callable[[int], torch.Tensor]  # layer -> output


@dataclass(frozen=True, slots=True)
class Timing:
    case: str
    label: str
    microseconds: float


def long_tail(rows: int, mean: int, longest: int) -> list[int]:
    random = torch.Generator().manual_seed(0)
    draws = torch.empty(rows).log_normal_(0, 1.2, generator=random)
    # Cutting the tail lowers the mean: scale until it is right.
    for _ in range(20):
        draws = (draws * mean / draws.clamp(max=longest).mean()).clamp(max=longest)
    return draws.ceil().int().tolist()


DECODE_CASES = (
    Case("512x768", [768] * 512),
    Case("64x384", [384] * 64),
    Case("1x1024", [1024]),
    Case("7b_1024x512", [512] * 1024, num_heads=28, num_kv_heads=4),
    Case("gemma3_256x512", [512] * 256, num_heads=4, num_kv_heads=1, head_dim=256),
    Case("tail", long_tail(512, 1024, 8192)),
    Case("groups", [2560] * 512, samples=16, prompt=2048),
    Case("groups_8k", [8704] * 512, samples=16, prompt=8192),
)
PREFILL_CASES = (
    Case("512x256", [256] * 512),
    Case("32x2048", [2048] * 32),
    Case("1x32768", [32768]),
    Case("7b_64x256", [256] * 64, num_heads=28, num_kv_heads=4),
    Case("gemma3_32x512", [512] * 32, num_heads=4, num_kv_heads=1, head_dim=256),
)
DECODE_SHAPES = (  # tile, warps, stages
    (32, 4, 4),
    (64, 2, 3),
    (64, 4, 3),
    (64, 4, 4),
    (128, 4, 2),
    (128, 8, 3),
)
DECODE_SPLITS = {  # by number of rows: splits, fewest tokens of one
    1: ((8, 64), (16, 64), (32, 32), (64, 16)),
    64: ((2, 64), (4, 64), (8, 64)),
    256: ((1, 128), (2, 128), (4, 128)),
    512: ((1, 512), (2, 256), (2, 512), (4, 256), (4, 512), (8, 512)),
    1024: ((1, 512), (2, 256), (2, 512)),
}
PREFILL_SHAPES = (  # pairs, keys, warps, stages
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
)


class PagedLayers:
    """Caches of several layers over one scattered page table."""

    def __init__(self, case: Case):
        counts = [-(-length // PAGE_SIZE) for length in case.lengths]
        pages = 1 + torch.randperm(sum(counts), dtype=torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, own in enumerate(pages.split(counts)):
            table[row, : len(own)] = own
            leader, shared = row - row % case.samples, case.prompt // PAGE_SIZE
            table[row, :shared] = table[leader, :shared]
        self.table = table.to(DEVICE)
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
        self.num_layers = min(256, max(2, COLD_BYTES // case.cache_bytes))
        shape = (1 + sum(counts), case.num_kv_heads, PAGE_SIZE, case.head_dim)
        self.keys, self.values = (
            [torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(self.num_layers)]
            for _ in range(2)
        )


def decode_variants(case: Case, layers: PagedLayers, defaults: bool) -> list[Variant]:
    num_rows = len(case.lengths)
    heads = (case.num_heads, case.num_kv_heads, case.head_dim)
    q_RNH = torch.randn(num_rows, heads[0], heads[2], dtype=DTYPE, device=DEVICE)
    slot_R = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    most = max(splits for splits, _ in DECODE_SPLITS[num_rows])
    usual = decode.splits_for(num_rows, case.num_kv_heads, device_of(DEVICE))
    workspace = decode.Workspace.make(num_rows, *heads, DEVICE, max(most, usual))

    together = shared_prompts(case, layers)

    def variant(
        label: str,
        splits: int,
        tiles: decode.DecodeTiles,
        shared: SharedPrompts | None = together,
        suffix: str = "",
    ) -> Variant:
        out_RNH = torch.empty_like(q_RNH)

        def run(layer: int) -> torch.Tensor:
            caches = (layers.keys[layer], layers.values[layer], layers.table, slot_R)
            if shared is not None:
                prompt_attention(q_RNH, *caches, shared)
            decode.decode_attention(
                q_RNH, *caches, layers.lengths, out_RNH, workspace, splits, shared, tiles
            )
            return out_RNH

        return Variant(f"decode_{case.name}{suffix}", label, run)

    tiles = decode.tiles_for(usual, case.head_dim, DTYPE, device_of(DEVICE))
    variants = [variant(f"default: splits {usual}, {describe(tiles)}", usual, tiles)]
    if together is not None:
        variants.append(variant("default", usual, tiles, None, "_alone"))
    for splits, min_split in () if defaults else DECODE_SPLITS[num_rows]:
        for tile, warps, stages in DECODE_SHAPES:
            shape = decode.DecodeTiles(tile, min_split, warps, stages)
            variants.append(variant(f"splits {splits}, {describe(shape)}", splits, shape))
    return variants


def shared_prompts(case: Case, layers: PagedLayers) -> SharedPrompts | None:
    """What the engine would let the rows of the case read together."""
    num_rows = len(case.lengths)
    heads = Heads(case.num_heads, case.num_kv_heads, case.head_dim, DTYPE)
    space = PromptSpace.make(num_rows, heads, DEVICE)
    first_page = layers.table[:, 0].cpu().numpy()
    plan = share_prompts(first_page, np.full(num_rows, case.prompt), num_rows, space)
    if plan is None:
        return None
    shared = SharedPrompts.make(num_rows, space)
    shared.flat.copy_(torch.from_numpy(plan))
    return shared


def prefill_variants(case: Case, layers: PagedLayers, defaults: bool) -> list[Variant]:
    num_rows, longest = sum(case.lengths), max(case.lengths)
    q_TNH = torch.randn(num_rows, case.num_heads, case.head_dim, dtype=DTYPE, device=DEVICE)
    ends = torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0)
    first_row, first_position = ends.int(), torch.zeros_like(layers.lengths)

    def variant(label: str, tiles: prefill.PrefillTiles) -> Variant:
        out_TNH = torch.empty_like(q_TNH)

        def run(layer: int) -> torch.Tensor:
            prefill.prefill_attention(
                q_TNH,
                layers.keys[layer],
                layers.values[layer],
                layers.table,
                first_row,
                first_position,
                out_TNH,
                longest,
                tiles,
            )
            return out_TNH

        return Variant(f"prefill_{case.name}", label, run)

    group = case.num_heads // case.num_kv_heads
    context = layers.table.shape[1] * PAGE_SIZE
    tiles = prefill.tiles_for(longest, context, group, case.head_dim, DTYPE, device_of(DEVICE))
    variants = [variant(f"default: {describe(tiles)}", tiles)]
    for shape in () if defaults else PREFILL_SHAPES:
        tiles = prefill.PrefillTiles(*shape)
        variants.append(variant(describe(tiles), tiles))
    if longest <= 2048:
        variants.append(rows_variant(case, layers, q_TNH))
    flashinfer = flashinfer_prefill(layers.keys[0], case.num_heads)
    if flashinfer is not None:
        variants.append(flashinfer_variant(case, layers, q_TNH, flashinfer))
    return variants


def rows_variant(case: Case, layers: PagedLayers, q_TNH: torch.Tensor) -> Variant:
    lengths = layers.lengths
    chunk_T = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths).int()
    position_T = torch.cat([torch.arange(n, dtype=torch.int32) for n in case.lengths]).to(DEVICE)
    out_TNH = torch.empty_like(q_TNH)

    def run(layer: int) -> torch.Tensor:
        keys, values = layers.keys[layer], layers.values[layer]
        decode.rows_attention(q_TNH, keys, values, layers.table, chunk_T, position_T, out_TNH)
        return out_TNH

    return Variant(f"prefill_{case.name}_rows", "default", run)


def flashinfer_variant(
    case: Case, layers: PagedLayers, q_TNH: torch.Tensor, flashinfer: FlashInferPrefill
) -> Variant:
    lengths, out_TNH = np.array(case.lengths), torch.empty_like(q_TNH)
    flashinfer.plan(lengths, np.zeros_like(lengths), layers.table.cpu().numpy())

    def run(layer: int) -> torch.Tensor:
        flashinfer.attend(q_TNH, layers.keys[layer], layers.values[layer], out_TNH)
        return out_TNH

    return Variant(f"prefill_{case.name}_flashinfer", "flashinfer", run)


def describe(tiles: decode.DecodeTiles | prefill.PrefillTiles) -> str:
    return ", ".join(f"{name} {getattr(tiles, name)}" for name in tiles.__slots__)


def measure(variants: list[Variant], num_layers: int) -> list[Timing]:
    """Times of the variants that fit the device; all must compute what the first does."""
    wanted = variants[0].run(0).float()
    timings = []
    for variant in variants:
        try:
            found = variant.run(0).float()
        except OutOfResources as error:
            print(f"  {variant.case:<22} {variant.label}: {error}")
            continue
        difference = ((found - wanted).norm() / wanted.norm()).item()
        assert difference < 1e-2, f"{variant.case}, {variant.label}: off by {difference}"
        seconds = replay_seconds(variant.run, num_layers)
        timings.append(Timing(variant.case, variant.label, 1e6 * seconds / num_layers))
    return timings


def replay_seconds(run: Callable[[int], object], num_layers: int, replays: int = 20) -> float:
    """Median time of a graph that runs every layer once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(num_layers):
                run(layer)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
        for mark in marks:
            graph.replay()
            mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks[2:], marks[3:], strict=False)]
    return statistics.median(times) / 1e3


def report(case: Case, timings: list[Timing], bandwidth: float) -> list[Row]:
    usual = timings[0]
    same_work = [timing for timing in timings if timing.case == usual.case]
    best = min(same_work, key=lambda timing: timing.microseconds)
    for timing in sorted(timings, key=lambda timing: timing.microseconds)[:10]:
        print(f"  {timing.case:<22} {timing.microseconds:>9.1f} us  {timing.label}")
    named = [(usual.case, usual), (f"{usual.case}_best", best)]
    named += [(timing.case, timing) for timing in timings if timing.case != usual.case]
    rows = []
    for name, timing in named:
        seconds = timing.microseconds / 1e6
        rows.append(Row(name, timing.microseconds, "us"))
        if name.startswith("decode"):
            share = 100 * case.cache_bytes / seconds / bandwidth
            rows.append(Row(f"{name}_share", share, "% of copy bandwidth"))
        else:
            rows.append(Row(f"{name}_tflops", case.causal_flop / seconds / 1e12, "TFLOP/s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--defaults", action="store_true", help="only the shapes the engine takes")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark/attention_kernels.py needs a CUDA device; none was found", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    bandwidth = measure_ceilings().bytes_per_s
    rows = [Row("copy_bandwidth", bandwidth / 1e12, "TB/s")]
    timings: list[Timing] = []
    for kind, cases, make in (
        ("decode", DECODE_CASES, decode_variants),
        ("prefill", PREFILL_CASES, prefill_variants),
    ):
        for case in cases:
            if args.only not in f"{kind}_{case.name}":
                continue
            layers = PagedLayers(case)
            measured = measure(make(case, layers, args.defaults), layers.num_layers)
            rows += report(case, measured, bandwidth)
            timings += measured
    print_table(rows)
    if args.json:
        write_json(args.json, rows, variants=[asdict(timing) for timing in timings])
    return 0


if __name__ == "__main__":
    sys.exit(main())
