"""A model with experts in bfloat16 behind the real runner: graphs, prefill, new weights."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tiny import tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.cuda.feed_forward import ExpertLayer
from areal.engine.native.cuda.linear import Products
from areal.engine.native.cuda.routing import router_arrivals
from areal.engine.native.cuda.runner import CudaRunner
from areal.engine.native.cuda.skinny_linear import SkinnyWorkspace
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest
from areal.models.common.attention import PackedAttention
from areal.models.common.moe import replay_experts

pytestmark = pytest.mark.gpu

VOCAB = 512
SHAPE = {
    "head_dim": 64,
    "hidden_size": 256,
    "vocab_size": VOCAB,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 3,
    "initializer_range": 0.05,
}
OWN = {
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_5_moe_text": {
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "shared_expert_intermediate_size": 192,
        "rms_norm_eps": 1e-6,
    },
}
# Rounding may choose another expert where two are nearly equal, so both compute by the experts that
# the engine returned. Then the engine may be as far from float32 as the module itself, with a
# margin for its own order of sums.
MARGIN = 1.5


def make_model(family="qwen3_moe", seed=0):
    model = tiny_model(family, seed=seed, **SHAPE, **OWN[family])
    return model.to("cuda", torch.bfloat16)


def make_requests(count, seed=0):
    rng = random.Random(seed)
    return [
        GenRequest(
            str(i),
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))],
            GenerationHyperparameters(seed=i, max_new_tokens=9, ignore_eos=True),
            return_routed_experts=True,
        )
        for i in range(count)
    ]


def run(engine: NativeEngine) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    while engine.has_work:
        done |= {one.rid: one for one in engine.step() if isinstance(one, Finished)}
    return done


@torch.no_grad()
def full_forward(model, sent: GenRequest, out: Finished) -> torch.Tensor:
    """Log-probabilities of the output by the experts on record, and by the router for the last."""
    tokens = torch.tensor(sent.input_ids + out.output_tokens, device="cuda")
    routed = torch.from_numpy(out.routed_experts).to("cuda")
    last = torch.full_like(routed[:1], 255)
    replay_experts(model, torch.cat([routed, last]))
    attend = PackedAttention(torch.tensor([0, len(tokens)], device="cuda"), len(tokens))
    hidden = model(tokens, torch.arange(len(tokens), device="cuda"), attend)
    replay_experts(model, None)
    logits = model.logits(hidden).float()[len(sent.input_ids) - 1 : -1]
    return logits.log_softmax(-1)[range(len(out.output_tokens)), out.output_tokens].cpu()


def check(engine, requests, done):
    exact = copy.deepcopy(engine.model).float()
    gaps, module_gaps = [], []
    for request in requests:
        out = done[request.rid]
        expected = full_forward(exact, request, out)
        gaps.append((torch.tensor(out.output_logprobs) - expected).abs())
        module_gaps.append((full_forward(engine.model, request, out) - expected).abs())
    gap, module_gap = torch.cat(gaps).mean(), torch.cat(module_gaps).mean()
    assert gap < MARGIN * module_gap, (gap, module_gap)


@pytest.mark.parametrize(
    ("family", "num_requests"),
    [
        *(("qwen3_moe", count) for count in (3, 8, 20, 100, 400)),
        *(("qwen3_5_moe_text", count) for count in (3, 100)),
    ],
)
def test_logprobs_are_those_of_the_module_also_with_new_weights(family, num_requests):
    engine = NativeEngine(make_model(family), num_pages=4096, max_running=512)
    assert isinstance(engine._runner, CudaRunner)
    requests = make_requests(num_requests)
    for version in range(2):
        if version:
            new = make_model(family, seed=1)
            engine.load_weights(new.named_hf_tensors(), version, recompute_kv=True)
        for request in requests:
            engine.add(request)
        check(engine, requests, run(engine))


@pytest.mark.parametrize("num_rows", [3, 64, 900])
def test_a_layer_computes_the_same_bits_at_every_launch(num_rows):
    """Whichever program of the router arrives last."""
    moe = make_model().layers["0"].feed_forward.requires_grad_(False)
    layer = ExpertLayer(moe, "silu", 0, router_arrivals(torch.device("cuda")), None)
    x_TD = torch.randn(num_rows, SHAPE["hidden_size"], device="cuda").bfloat16()
    routed_TLK = torch.zeros(num_rows, 1, SHAPE["num_experts_per_tok"], device="cuda").int()
    products = Products("cublas", SkinnyWorkspace.make(x_TD.device), x_TD.dtype)
    first_TKD = layer.forward(x_TD, routed_TLK, products)
    first_routed = routed_TLK.clone()
    for _ in range(50):
        assert torch.equal(layer.forward(x_TD, routed_TLK, products), first_TKD)
        assert torch.equal(routed_TLK, first_routed)
