"""Times of the decode step's own kernels on one GPU, against torch and the memory's bandwidth.

Every number is a replay of a CUDA graph. The linear layers of 1 to 8 rows walk through the weights
of all layers of a model, so that no weight is in the cache when its turn comes; each is timed with
torch (`F.linear` alone, without the norm and activation ours include), with the plan of the rule in
`small_linear.py`, and with a set of other plans. The best are printed, and all linear layers of one
token are timed as a chain, with and without overlapping kernels. Those of 16 to 128 rows
(`skinny_linear.py`) go the same way, without a norm. A rule is good if its chain is close to the
chain of the best plans, for every model.

    python benchmark/small_kernels.py --json kernels.json
    python benchmark/small_kernels.py --only skinny
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from report import Row, print_table, write_json
from triton.runtime.errors import OutOfResources

from areal.engine.native.cuda import block_kernels, step_kernels
from areal.engine.native.cuda.device import device_of
from areal.engine.native.cuda.skinny_linear import Plan as SkinnyPlan
from areal.engine.native.cuda.skinny_linear import (
    SkinnyWorkspace,
    skinny_gate_up,
    skinny_linear,
)
from areal.engine.native.cuda.skinny_linear import plan_for as skinny_plan_for
from areal.engine.native.cuda.small_linear import (
    Plan,
    norm_linear,
    plan_for,
    small_gate_up,
    small_linear,
)

DTYPE = torch.bfloat16
EPS = 1e-6
ROWS = (1, 2, 8)
SKINNY_ROWS = (16, 32, 64, 128)
REPLAYS = 11
PAGE_SIZE = 16

ONE_ROW_VARIANTS = (
    Plan(2, 1024, 4), Plan(2, 2048, 4), Plan(4, 512, 2), Plan(4, 1024, 4),
    Plan(4, 2048, 4, programs=660), Plan(2, 4096, 8), Plan(4, 4096, 8, programs=264),
)  # fmt: skip
FEW_ROWS_VARIANTS = (
    Plan(16, 256, 1, stages=6), Plan(16, 256, 2, stages=6), Plan(32, 128, 2, stages=6),
    Plan(32, 256, 4, stages=5),
)  # fmt: skip
# By the weight's kind: what could beat the default, which fills the device once.
SKINNY_VARIANTS = {
    "qkv": (
        SkinnyPlan(64, 64, 4, 4, parts=4), SkinnyPlan(64, 64, 4, 4, parts=2),
        SkinnyPlan(128, 64, 4, 4, parts=6),
    ),
    "o": (
        SkinnyPlan(64, 64, 4, 4, parts=4), SkinnyPlan(64, 64, 4, 6, parts=3),
        SkinnyPlan(128, 64, 4, 4, parts=8),
    ),
    "gate_up": (
        SkinnyPlan(128, 64, 4, 3), SkinnyPlan(128, 64, 4, 4), SkinnyPlan(64, 128, 4, 3),
        SkinnyPlan(256, 64, 8, 4),
    ),
    "down": (
        SkinnyPlan(64, 64, 4, 4, parts=8), SkinnyPlan(128, 64, 4, 4, parts=9),
        SkinnyPlan(128, 64, 4, 6, parts=4), SkinnyPlan(128, 64, 4, 4, parts=5),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dim: int
    hidden_dim: int
    vocab_size: int


MODELS = (
    Model("1.5b", 28, 12, 2, 128, 1536, 8960, 151936),
    Model("7b", 28, 28, 4, 128, 3584, 18944, 152064),
    Model("llama_3b", 28, 24, 8, 128, 3072, 8192, 128256),
    Model("qwen3_4b", 36, 32, 8, 128, 2560, 9728, 151936),
)


AnyPlan = Plan | SkinnyPlan


class Linears:
    """All weights of a model and one buffer of each activation: what a token's linears touch."""

    def __init__(self, model: Model, num_rows: int, weights: dict[str, list[torch.Tensor]]) -> None:
        self.num_rows, self.weights = num_rows, weights
        qkv_dim = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self.norm = block_kernels.Norm(_random(model.dim), EPS)
        self.bias = _random(qkv_dim)
        self.x = _random(num_rows, model.dim)
        self.attended = _random(num_rows, model.num_heads * model.head_dim)
        self.qkv = _random(num_rows, qkv_dim)
        self.activated = _random(num_rows, model.hidden_dim)
        self.logits = torch.empty(num_rows, model.vocab_size, device="cuda")
        self.workspace = SkinnyWorkspace.make(torch.device("cuda"))

    def run(self, kind: str, layer: int, plan: AnyPlan) -> None:
        weight = self.weights[kind][layer]
        if isinstance(plan, SkinnyPlan):
            self._run_skinny(kind, weight, plan)
        elif kind == "qkv":
            norm_linear(self.x, self.norm, weight, self.bias, self.qkv, plan)
        elif kind == "o":
            small_linear(self.attended, weight, None, self.x, self.x, plan)
        elif kind == "gate_up":
            small_gate_up(self.x, self.norm, weight, "silu", self.activated, plan)
        elif kind == "down":
            small_linear(self.activated, weight, None, self.x, self.x, plan)
        else:
            norm_linear(self.x, self.norm, weight, None, self.logits, plan)

    def _run_skinny(self, kind: str, weight: torch.Tensor, plan: SkinnyPlan) -> None:
        if kind == "qkv":
            skinny_linear(self.x, weight, self.bias, self.qkv, self.workspace, plan)
        elif kind == "gate_up":
            skinny_gate_up(self.x, weight, "silu", self.activated, self.workspace, plan)
        else:
            source = self.attended if kind == "o" else self.activated
            skinny_linear(source, weight, None, self.x, self.workspace, plan)

    def run_torch(self, kind: str, layer: int) -> None:
        source = {"o": self.attended, "down": self.activated}.get(kind, self.x)
        F.linear(source, self.weights[kind][layer], self.bias if kind == "qkv" else None)

    @property
    def is_skinny(self) -> bool:
        return self.num_rows > max(ROWS)

    def plan(self, kind: str) -> AnyPlan:
        """The rule's."""
        weight_rows, dim = self.weights[kind][0].shape
        device = device_of(self.x.device)
        if self.is_skinny:
            return skinny_plan_for(self.num_rows, weight_rows, dim, device)
        return plan_for(self.num_rows, weight_rows, dim, kind not in ("o", "down"), device)

    def other_plans(self, kind: str) -> tuple[AnyPlan, ...]:
        if self.is_skinny:
            # 128 x 128 sums are too many for the registers of 4 warps.
            return tuple(
                replace(plan, warps=8) if plan.rows == self.num_rows == 128 else plan
                for plan in SKINNY_VARIANTS[kind]
            )
        return ONE_ROW_VARIANTS if self.num_rows == 1 else FEW_ROWS_VARIANTS

    def time(self, kind: str, plan: AnyPlan | None) -> float:
        """Microseconds of one layer's linear; of torch's when there is no plan."""
        layers = range(len(self.weights[kind]))

        def walk() -> None:
            for layer in layers:
                if plan is None:
                    self.run_torch(kind, layer)
                else:
                    self.run(kind, layer, plan)

        return _microseconds(walk) / len(layers)

    def time_token(self, plans: dict[str, AnyPlan] | None, overlap: bool = True) -> float:
        """Microseconds of all linears of one token, each waiting for the one before it."""
        if plans and not overlap:
            plans = {kind: replace(plan, overlap=False) for kind, plan in plans.items()}

        def run(kind: str, layer: int) -> None:
            if plans is None:
                self.run_torch(kind, layer)
            else:
                self.run(kind, layer, plans[kind])

        def walk() -> None:
            for layer in range(len(self.weights["qkv"])):
                for kind in ("qkv", "o", "gate_up", "down"):
                    run(kind, layer)
            if "head" in self.weights:
                run("head", 0)

        return _microseconds(walk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--only", choices=("blocks", "few", "skinny"), help="one part alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("small_kernels needs a CUDA device; found none", file=sys.stderr)
        return 2
    bandwidth = _copy_bandwidth()
    rows = [Row("copy_bandwidth", bandwidth / 1e12, "TB/s, read and written")]
    variants: list[dict] = []
    for model in MODELS:
        if args.only in (None, "blocks"):
            rows += _measure_blocks(model)
        weights = {} if args.only == "blocks" else _draw_weights(model)
        if args.only in (None, "few"):
            rows += _measure_linears(model, weights, ROWS, bandwidth, variants)
        weights.pop("head", None)
        if args.only in (None, "skinny"):
            rows += _measure_linears(model, weights, SKINNY_ROWS, bandwidth, variants)
    print_table(rows)
    _print_best(variants)
    if args.json:
        plain = [entry | {"plan": entry["plan"] and asdict(entry["plan"])} for entry in variants]
        write_json(args.json, rows, variants=plain)
    return 0


def _measure_linears(
    model: Model,
    weights: dict[str, list[torch.Tensor]],
    row_counts: tuple[int, ...],
    bandwidth: float,
    variants: list[dict],
) -> list[Row]:
    rows: list[Row] = []
    num_bytes = sum(2 * weight.numel() for kind in weights.values() for weight in kind)
    for num_rows in row_counts:
        linears = Linears(model, num_rows, weights)
        best: dict[str, AnyPlan] = {}
        for kind in weights:
            found = _measure_variants(model, linears, kind, bandwidth)
            variants += found
            best[kind] = min(found[1:], key=lambda entry: entry["microseconds"])["plan"]
            rows += _summary(f"{model.name}_{kind}_m{num_rows}", found)
        planned = {kind: linears.plan(kind) for kind in weights}
        times = {
            "torch": linears.time_token(None),
            "rule": linears.time_token(planned),
            "rule_no_overlap": linears.time_token(planned, overlap=False),
            "best": linears.time_token(best),
            "best_no_overlap": linears.time_token(best, overlap=False),
        }
        for name, value in times.items():
            share = num_bytes / (value * 1e-6) / bandwidth
            unit = f"us, {share:.0%} of bandwidth"
            rows.append(Row(f"{model.name}_all_linears_m{num_rows}_{name}", value, unit))
    return rows


def _measure_variants(model: Model, linears: Linears, kind: str, bandwidth: float) -> list[dict]:
    """One entry per plan, the rule's first after torch's."""
    num_rows, planned = linears.num_rows, linears.plan(kind)
    plans = [None, planned, *(plan for plan in linears.other_plans(kind) if plan != planned)]
    num_bytes = 2 * linears.weights[kind][0].numel()
    found = []
    for plan in plans:
        try:
            microseconds = linears.time(kind, plan)
        except OutOfResources:
            continue  # more shared memory than this device has
        found.append(
            {
                "model": model.name,
                "kind": kind,
                "shape": list(linears.weights[kind][0].shape),
                "rows": num_rows,
                "plan": plan,
                "of_rule": plan == planned,
                "microseconds": microseconds,
                "share": num_bytes / (microseconds * 1e-6) / bandwidth,
            }
        )
    return found


def _summary(name: str, found: list[dict]) -> list[Row]:
    torch_entry, planned = found[0], found[1]
    best = min(found[1:], key=lambda entry: entry["microseconds"])
    return [
        Row(f"{name}_{label}", entry["microseconds"], f"us, {entry['share']:.0%} of bandwidth")
        for label, entry in (("torch", torch_entry), ("rule", planned), ("best", best))
    ]


def _print_best(variants: list[dict]) -> None:
    """Per shape, the plan with the least time over all numbers of rows it is used for."""
    groups = [("one row", {1}), ("few rows", set(ROWS) - {1})]
    groups += [(f"{count} rows", {count}) for count in SKINNY_ROWS]
    for label, counts in groups:
        totals: dict[tuple, dict[AnyPlan, float]] = {}
        for entry in variants:
            if entry["rows"] in counts and entry["plan"]:
                of_shape = totals.setdefault((entry["kind"], *entry["shape"]), {})
                time = of_shape.get(entry["plan"], 0.0) + entry["microseconds"]
                of_shape[entry["plan"]] = time
        if totals:
            print(f"best plans, {label}, us (rows/block/warps/stages, then parts or programs):")
        for (kind, *shape), of_shape in totals.items():
            ranked = sorted(of_shape.items(), key=lambda item: item[1])
            tried = ", ".join(
                f"{time / len(counts):.2f} ({_brief(plan)})" for plan, time in ranked[:5]
            )
            print(f"    {kind} {tuple(shape)}: {tried}")


def _brief(plan: AnyPlan) -> str:
    last = plan.parts if isinstance(plan, SkinnyPlan) else plan.programs
    return f"{plan.rows}/{plan.block}/{plan.warps}/{plan.stages}/{last}"


def _measure_blocks(model: Model) -> list[Row]:
    rows = []
    for num_rows in (1, 64, 512, 1024):
        for name, run in _block_kernels(model, num_rows).items():
            rows.append(Row(f"{model.name}_{name}_t{num_rows}", _microseconds(run, 20) / 20, "us"))
    return rows


def _block_kernels(model: Model, num_rows: int) -> dict[str, Callable[[], None]]:
    """The kernels of a block and of a step, on activations that the cache holds."""
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    x, residual, out = (_random(num_rows, model.dim) for _ in range(3))
    norm = block_kernels.Norm(_random(model.dim), EPS)
    gate_up, activated = (
        _random(num_rows, 2 * model.hidden_dim),
        _random(num_rows, model.hidden_dim),
    )
    qkv = _random(num_rows, (heads + 2 * kv_heads) * head_dim)
    cos, sin = (_random(num_rows, head_dim // 2) for _ in range(2))
    write = torch.randperm(64 * num_rows, device="cuda")[:num_rows].int()
    keys, values = (_random(4 * num_rows, kv_heads, PAGE_SIZE, head_dim) for _ in range(2))
    q_out = _random(num_rows, heads, head_dim)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    slots = torch.arange(num_rows, device="cuda").int()
    slot_state = [zeros(num_rows + 1).fill_(1) for _ in range(3)]
    pages, history = zeros(num_rows + 1, 512), zeros(num_rows + 1, 8192)
    tokens, positions, write_out, logprobs = (zeros(num_rows) for _ in range(4))
    ring = zeros(8, num_rows)
    logprobs, logprob_ring, count = logprobs.float(), ring.float(), zeros(1)
    return {
        "rms_norm": lambda: block_kernels.rms_norm(x, norm, out),
        "torch_rms_norm": lambda: F.rms_norm(x, (model.dim,), norm.weight, EPS),
        "add_rms_norm": lambda: block_kernels.add_rms_norm(x, residual, norm, out),
        "gate_mul": lambda: block_kernels.gate_mul(gate_up, "silu", activated),
        "rope_and_cache": lambda: block_kernels.rope_and_cache(
            qkv, cos, sin, write, keys, values, q_out, None, None
        ),
        "prepare_decode": lambda: step_kernels.prepare_decode(
            slots, *slot_state[:2], pages, PAGE_SIZE, tokens, positions, write_out
        ),
        "finish_decode": lambda: step_kernels.finish_decode(
            slots, tokens, logprobs, *slot_state, history, count, ring, logprob_ring
        ),
    }


def _draw_weights(model: Model) -> dict[str, list[torch.Tensor]]:
    qkv_dim = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    shapes = {
        "qkv": (qkv_dim, model.dim),
        "o": (model.dim, model.num_heads * model.head_dim),
        "gate_up": (2 * model.hidden_dim, model.dim),
        "down": (model.dim, model.hidden_dim),
    }
    weights = {
        kind: [_random(*shape, scale=0.02) for _ in range(model.num_layers)]
        for kind, shape in shapes.items()
    }
    return weights | {"head": [_random(model.vocab_size, model.dim, scale=0.02)]}


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(std=scale)


def _copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy far larger than the cache."""
    source = _random(2**31)
    target = torch.empty_like(source)
    num_bytes = 2 * source.numel() * source.element_size()
    return num_bytes / (_microseconds(lambda: target.copy_(source)) * 1e-6)


def _microseconds(run: Callable[[], None], times: int = 1) -> float:
    """Median time of a graph of `times` runs."""
    run()  # compiles, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    durations = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # half a millisecond: the host is ahead when the clock starts
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        durations.append(start.elapsed_time(end) * 1000)
    return statistics.median(durations[3:])


if __name__ == "__main__":
    sys.exit(main())
