"""Adapters in captured graphs on CUDA: each row has the log-probabilities of its merged model."""

from __future__ import annotations

import copy

import pytest
import torch
from adapter_models import ATTENTION, MLP, adapter_tensors, merged_model
from tiny import tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.adapters import read_adapter
from areal.engine.native.cuda.runner import CudaRunner
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import GenRequest
from areal.models.common.attention import PackedAttention

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 3000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
}


@torch.no_grad()
def logprobs_of(model, prompt, output) -> torch.Tensor:
    tokens = torch.tensor(prompt + output, device="cuda")
    attend = PackedAttention(torch.tensor([0, len(tokens)], device="cuda"), len(tokens))
    hidden = model(tokens, torch.arange(len(tokens), device="cuda"), attend)
    logits = model.logits(hidden).double()[len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(output)), output].float()


@pytest.mark.parametrize("num_requests", [3, 40, 200])
@pytest.mark.parametrize("drafts", [False, True])
def test_rows_have_their_own_adapters(num_requests, drafts):
    """Few rows, as many as skinny products take, and more; published and removed in between."""
    plain = tiny_model("qwen2", seed=0, **SHAPE).to("cuda", torch.bfloat16)
    engine = NativeEngine(copy.deepcopy(plain), max_running=256, drafts=drafts)
    assert isinstance(engine._runner, CudaRunner)
    models = {"": plain}
    for number, rank in enumerate((4, 16, 40, 8, 64, 1)):
        tensors = adapter_tensors(plain, number, rank, *ATTENTION, *MLP, scale=0.05)
        alpha, name = 2.0 * rank, f"adapter-{number}"
        adapter = read_adapter(engine.model, tensors.items(), alpha=alpha)
        engine.adapters.add(name, adapter)
        models[name] = merged_model(plain, tensors, alpha)
        if number == 2:  # graphs of smaller stacks are captured first
            check_batch(engine, models, num_requests)
    check_batch(engine, models, num_requests)
    engine.remove_adapter("adapter-1")
    models.pop("adapter-1")
    check_batch(engine, models, num_requests)


def check_batch(engine, models, num_requests) -> None:
    names = list(models)
    prompts = [[(7 * i + j) % 3000 for j in range(5 + i % 9)] for i in range(num_requests)]
    for i, prompt in enumerate(prompts):
        options = GenerationHyperparameters(
            seed=i, max_new_tokens=9, ignore_eos=True, lora_name=names[i % len(names)]
        )
        engine.add(GenRequest(str(i), prompt, options))
    own, others = [], []  # mean differences of rows, bfloat16, of log-probabilities around -8
    while engine.has_work:
        for done in engine.step():
            name = names[int(done.rid) % len(names)]
            for other, model in models.items():
                expected = logprobs_of(model, prompts[int(done.rid)], done.output_tokens)
                found = torch.tensor(done.output_logprobs, device="cuda")
                difference = (found - expected).abs().mean().item()
                (own if other == name else others).append(difference)
    assert max(own) < 0.08
    assert sum(others) / len(others) > 0.3
