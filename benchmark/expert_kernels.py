"""Times of the kernels for experts on one GPU, against the memory's bandwidth and other plans.

    python benchmark/expert_kernels.py [--json FILE]

Every number is the time of one launch in a replayed CUDA graph that walks through several layers of
weights in the shape of Qwen3 30B-A3B, so that no expert is in the cache when its turn comes. First
all kernels of a layer together, for decode steps and a prefill; then each product with the plan of
its rule and with others. TB/s counts each chosen expert once, TFLOP/s each (token, expert) pair.
A plan is named by its numbers: outputs, block and warps for few rows; block_m, rows, block, warps
and stages for grouped ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from report import Row, print_table, write_json
from triton.runtime.errors import OutOfResources

from areal.engine.native.cuda import expert_linear, expert_vector
from areal.engine.native.cuda.block_kernels import Norm
from areal.engine.native.cuda.device import device_of
from areal.engine.native.cuda.feed_forward import ExpertLayer
from areal.engine.native.cuda.linear import Products
from areal.engine.native.cuda.routing import Blocks, group_by_expert, router_arrivals
from areal.engine.native.cuda.skinny_linear import SkinnyWorkspace
from areal.models.common.moe import MoE
from areal.models.hf_io import build_model

CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
EPS = 1e-6
REPLAYS = 7
LAYER_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096, 16384)
MAX_FEW_ROWS = 8
COMPUTE_BOUND_ROWS = 2048
FEW_ROWS = (1, 4)
GATE_UP_PLANS = [(1, 2048, 4), (1, 1024, 2), (2, 1024, 4), (2, 2048, 4), (4, 1024, 4)]
DOWN_PLANS = [(1, 1024, 2), (1, 1024, 4), (1, 1024, 8), (2, 1024, 4), (2, 1024, 8), (4, 1024, 8)]
# block_m, rows, block, warps, stages
GROUPED_PLANS = {
    64: [(16, 128, 64, 4, 5), (16, 256, 64, 8, 5), (16, 256, 128, 8, 3)],
    256: [
        (32, 128, 64, 4, 4), (32, 256, 64, 8, 3), (32, 256, 64, 8, 5), (64, 256, 64, 8, 5),
        (16, 128, 128, 4, 3),
    ],
    512: [
        (64, 256, 64, 8, 3), (64, 256, 64, 4, 5), (64, 256, 128, 8, 2), (64, 128, 64, 4, 4),
        (64, 128, 128, 4, 2), (32, 128, 64, 4, 5), (32, 256, 64, 8, 5),
    ],
    16384: [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4)],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layers:
    moes: list[MoE]
    fused: list[ExpertLayer]
    norm: Norm
    products: Products

    @classmethod
    def make(cls) -> Layers:
        model = build_model(CONFIG, device="cuda", dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.02)
        blocks = list(model.blocks)
        moes = [block.feed_forward for block in blocks if isinstance(block.feed_forward, MoE)]
        arrivals = router_arrivals(model.embedding_weight.device)
        fused = [ExpertLayer(moe, "silu", i, arrivals, None) for i, moe in enumerate(moes)]
        products = Products("cublas", SkinnyWorkspace.make(arrivals.device), torch.bfloat16)
        return cls(moes, fused, Norm(blocks[0].ffn_norm.weight.detach(), EPS), products)

    def routed(self, num_rows: int) -> torch.Tensor:
        router = self.moes[0].router
        shape = (num_rows, len(self.moes), router.top_k)
        return torch.zeros(shape, dtype=torch.int32, device="cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark/expert_kernels.py needs a CUDA device; none was found", file=sys.stderr)
        return 1
    with torch.inference_mode():
        layers = Layers.make()
        rows = [row for num_rows in LAYER_ROWS for row in layer_rows(layers, num_rows)]
        rows += [row for num_rows in FEW_ROWS for row in few_rows(layers, num_rows)]
        rows += [row for num_rows in GROUPED_PLANS for row in grouped_rows(layers, num_rows)]
    if args.json:
        write_json(args.json, rows)
    return 0


def layer_rows(layers: Layers, num_rows: int) -> list[Row]:
    """All kernels of a layer: for few rows both ways, to see where one overtakes the other."""
    x_TD = torch.randn(num_rows, CONFIG["hidden_size"], device="cuda").bfloat16()
    routed_TLK = layers.routed(num_rows)

    def many() -> None:
        for layer in layers.fused:
            layer.forward(x_TD, routed_TLK, layers.products)

    def few() -> None:
        for layer in layers.fused:
            layer.forward_few(x_TD, layers.norm, routed_TLK)

    ways = {"many": many} | ({"few": few} if num_rows <= MAX_FEW_ROWS else {})
    rows = []
    for name, work in ways.items():
        seconds = graph_seconds(work) / len(layers.fused)
        rows.append(Row(f"layer_{num_rows}/{name}", 1e6 * seconds, "us"))
        rows.append(rate(f"layer_{num_rows}/{name}_rate", seconds, routed_TLK, products=3))
    print_table(rows)
    return rows


def few_rows(layers: Layers, num_rows: int) -> list[Row]:
    x_TD, experts, weights_TK, hidden_SF, out_TD = inputs(layers, num_rows)

    def gate_up(plan: expert_vector.Plan) -> None:
        for moe, experts_TK in zip(layers.moes, experts.unbind(1), strict=True):
            w1, _, w3 = moe.experts.weights()
            expert_vector.vector_gate_up(x_TD, w1, w3, "silu", experts_TK, hidden_SF, plan)

    def down(plan: expert_vector.Plan) -> None:
        for moe, experts_TK in zip(layers.moes, experts.unbind(1), strict=True):
            w2 = moe.experts.w2
            expert_vector.vector_down(hidden_SF, w2, weights_TK, experts_TK, x_TD, out_TD, plan)

    rows = []
    for name, work, plans, products in (
        ("gate_up", gate_up, GATE_UP_PLANS, 2),
        ("down", down, DOWN_PLANS, 1),
    ):
        for numbers in plans:
            plan = expert_vector.Plan(*numbers)
            seconds = graph_seconds(partial(work, plan)) / len(layers.moes)
            rows.append(
                rate(f"few_{num_rows}/{name}/{plan_name(numbers)}", seconds, experts, products)
            )
    print_table(rows)
    return rows


def grouped_rows(layers: Layers, num_rows: int) -> list[Row]:
    x_TD, experts, weights_TK, hidden_SF, _ = inputs(layers, num_rows)
    out_SD = x_TD.new_empty(len(hidden_SF), x_TD.shape[1])
    device = device_of(x_TD.device)
    block_m = expert_linear.block_m_for(8 * num_rows, 128)
    rules = [
        expert_linear.plan_for(block_m, dim, 2, device)
        for dim in (x_TD.shape[1], hidden_SF.shape[1])
    ]
    plans = [expert_linear.Plan(*numbers) for numbers in GROUPED_PLANS[num_rows]]

    def gate_up(plan: expert_linear.Plan, grouped: list[Blocks]) -> None:
        for moe, blocks in zip(layers.moes, grouped, strict=True):
            w1, _, w3 = moe.experts.weights()
            expert_linear.expert_gate_up(x_TD, w1, w3, "silu", blocks, 8, hidden_SF, plan)

    def down(plan: expert_linear.Plan, grouped: list[Blocks]) -> None:
        for moe, blocks in zip(layers.moes, grouped, strict=True):
            w2 = moe.experts.w2
            expert_linear.expert_down(hidden_SF, w2, weights_TK, blocks, out_SD, plan)

    rows = []
    for plan in [*rules, *plans]:
        grouped = [group_by_expert(e, 128, plan.block_m) for e in experts.unbind(1)]
        numbers = (plan.block_m, plan.rows, plan.block, plan.warps, plan.stages)
        for i, (product, work, products) in enumerate([("gate_up", gate_up, 2), ("down", down, 1)]):
            if plan in rules and plan is not rules[i]:
                continue
            name = "rule" if plan is rules[i] else plan_name(numbers)
            try:
                seconds = graph_seconds(partial(work, plan, grouped)) / len(layers.moes)
            except OutOfResources:
                continue
            rows.append(rate(f"grouped_{num_rows}/{product}/{name}", seconds, experts, products))
    print_table(rows)
    return rows


def inputs(layers: Layers, num_rows: int):
    """x, experts [T, L, K], weights, hidden states and an output, for products alone."""
    dim, hidden_dim = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    experts = layers.routed(num_rows)
    scores = torch.rand(*experts.shape[:2], CONFIG["num_experts"], device="cuda")
    experts.copy_(scores.topk(experts.shape[2]).indices)
    weights_TK = torch.rand(num_rows, experts.shape[2], device="cuda")
    x_TD, out_TD = (torch.randn(num_rows, dim, device="cuda").bfloat16() for _ in range(2))
    hidden_SF = torch.randn(num_rows * experts.shape[2], hidden_dim, device="cuda").bfloat16()
    return x_TD, experts, weights_TK, hidden_SF, out_TD


def plan_name(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def rate(name: str, seconds: float, routed_TLK: torch.Tensor, products: int) -> Row:
    """Of `products` matrices per expert: the operations of many rows, the bytes of fewer."""
    num_rows, num_layers, top_k = routed_TLK.shape
    numbers = products * CONFIG["hidden_size"] * CONFIG["moe_intermediate_size"]
    if num_rows > COMPUTE_BOUND_ROWS:
        return Row(name, 2 * num_rows * top_k * numbers / seconds / 1e12, "TFLOP/s")
    chosen = sum(len(layer.unique()) for layer in routed_TLK.unbind(1)) / num_layers
    return Row(name, 2 * chosen * numbers / seconds / 1e12, "TB/s")


def graph_seconds(work: Callable[[], None]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
