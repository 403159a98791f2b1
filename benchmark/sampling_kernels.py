"""What a draw costs on the GPU: microseconds per batch of rows, kind of sampling and tiling.

    python benchmark/sampling_kernels.py [--json FILE] [--rows 1 64 512 1024]

For each number of rows: `limit`, reading the float32 logits once at the copy bandwidth measured
here; `torch`, softmax, multinomial and gather; and our kernels, plain, with top-p, with top-k and
top-p, and with a frequency penalty over 1024 tokens of history. Then the same draws with other
tiles: `race BxW` is a block of B tokens for W warps (plain draw), `cut BxWxS` the search for a cut
with S stages (top-p draw). Times are of replayed CUDA graphs, as a decode step runs them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from report import Row, print_table, write_json

from areal.engine.native.cuda.sampler import (
    MAX_STOP_IDS,
    DeviceSampling,
    SamplingTiles,
    SamplingWorkspace,
    sample_rows,
)

VOCAB_SIZE = 151_936
NUM_HISTORY = 1024
DEVICE = torch.device("cuda")
KINDS = {
    "plain": {},
    "top_p": {"top_p": 0.95},
    "top_k_top_p": {"top_k": 50, "top_p": 0.95},
    "penalty": {"frequency_penalty": 0.1},
    "constrained": {"constrained": 1},
}
CHANGE_LOGITS = {"frequency_penalty", "constrained"}
RACE_TILES = [(1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 16)]
CUT_TILES = [
    (2048, 8, 3), (2048, 16, 1), (2048, 16, 3), (2048, 16, 4), (4096, 16, 2), (4096, 16, 3),
    (4096, 32, 3), (8192, 32, 2),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512, 1024])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmark/sampling_kernels.py needs a CUDA device; torch found none.")
    bandwidth = copy_bandwidth()
    rows = [Row("copy_bandwidth", bandwidth / 1e12, "TB/s")]
    for num_rows in args.rows:
        rows += measure(num_rows, bandwidth)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(num_rows: int, bandwidth: float) -> list[Row]:
    logits_RV = torch.randn(num_rows, VOCAB_SIZE, device=DEVICE) * 2
    times = {
        "limit": logits_RV.nbytes / bandwidth * 1e6,
        "torch": microseconds(lambda: torch_draw(logits_RV)),
    }
    for kind, changes in KINDS.items():
        times[kind] = draw_time(logits_RV, changes, SamplingTiles())
    for block, warps in RACE_TILES:
        tiles = replace(SamplingTiles(), block=block, num_warps=warps)
        times[f"race {block}x{warps}"] = draw_time(logits_RV, {}, tiles)
    for block, warps, stages in CUT_TILES:
        tiles = replace(SamplingTiles(), cut_block=block, cut_warps=warps, cut_stages=stages)
        name = f"cut {block}x{warps}x{stages}"
        times[name] = draw_time(logits_RV, KINDS["top_p"], tiles)
    return [Row(f"{num_rows}_{name}", value, "us") for name, value in times.items()]


def draw_time(logits_RV: torch.Tensor, changes: dict[str, float], tiles: SamplingTiles) -> float:
    num_rows = len(logits_RV)
    options = sampling_options(num_rows, **changes)
    slot_R = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    token_R, logprob_R = torch.zeros_like(slot_R), torch.zeros(num_rows, device=DEVICE)
    workspace = SamplingWorkspace.allocate(num_rows, VOCAB_SIZE, DEVICE, tiles)
    # Penalties change the logits in place, a little more with each repetition, and so do masks.
    given_RV = logits_RV.clone() if changes.keys() & CHANGE_LOGITS else logits_RV
    return microseconds(
        lambda: sample_rows(given_RV, slot_R, options, token_R, logprob_R, workspace)
    )


def sampling_options(
    num_slots: int,
    *,
    top_k: int = 2**31 - 1,
    top_p: float = 1.0,
    frequency_penalty: float = 0.0,
    constrained: int = 0,
) -> DeviceSampling:
    def column(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full((num_slots, *shape), value, dtype=dtype, device=DEVICE)

    return DeviceSampling(
        temperature_S=column(1.0, torch.float32),
        top_k_S=column(top_k, torch.int32),
        top_p_S=column(top_p, torch.float32),
        greedy_S=column(0, torch.int32),
        seed_S=torch.arange(num_slots, device=DEVICE),
        num_output_S=column(NUM_HISTORY, torch.int32),
        min_output_S=column(0, torch.int32),
        frequency_penalty_S=column(frequency_penalty, torch.float32),
        stop_ids_SM=column(-1, torch.int32, MAX_STOP_IDS),
        history_SC=torch.randint(
            VOCAB_SIZE, (num_slots, NUM_HISTORY), dtype=torch.int32, device=DEVICE
        ),
        constrained_S=column(constrained, torch.int32),
        allowed_SB=column(0b101, torch.int32, -(-VOCAB_SIZE // 32)),
    )


def torch_draw(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    probs_RV = torch.softmax(logits_RV, dim=-1)
    token_R1 = torch.multinomial(probs_RV, 1)
    return token_R1, probs_RV.gather(1, token_R1).log()


def copy_bandwidth() -> float:
    """Bytes read and written per second."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source)) * 1e6


def microseconds(call: Callable[[], object], *, per_graph: int = 10, replays: int = 7) -> float:
    """The median time of a call, ten of them in one captured graph."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / per_graph)
    return statistics.median(times)


if __name__ == "__main__":
    main()
