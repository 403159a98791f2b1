"""Weight names: round trip of every family, names that carry nothing, and unknown names."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "gemma3_text", "qwen3_5_text"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_keeps_every_name_and_tensor(family, tied):
    bias = {} if family == "qwen2" else {"attention_bias": True, "mlp_bias": True}
    model = tiny_model(family, tie_word_embeddings=tied, num_hidden_layers=12, **bias)
    state = dict(model.named_parameters())
    hf_state = model.adapter.to_hf(state)
    assert len(hf_state) == len(state)
    assert ("lm_head.weight" in hf_state) != tied
    back = model.adapter.from_hf(hf_state)
    assert back.keys() == state.keys()
    assert all(back[name] is state[name] for name in state)


def test_round_trip_of_experts_stacks_them_again():
    model = tiny_model("qwen3_moe", num_experts=12, num_hidden_layers=11, mlp_only_layers=[0])
    state = dict(model.named_parameters())
    hf_state = model.adapter.to_hf(state)
    stacks = [name for name in state if ".experts." in name]
    assert len(stacks) == 30 and len(hf_state) == len(state) + 30 * 11
    expert = hf_state["model.layers.10.mlp.experts.11.down_proj.weight"]
    assert torch.equal(expert, model.layers["10"].feed_forward.experts.w2[11])
    assert expert.data_ptr() == model.layers["10"].feed_forward.experts.w2[11].data_ptr()
    back = model.adapter.from_hf(dict(reversed(hf_state.items())))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_layer_numbers_survive():
    adapter = tiny_model("qwen3").adapter
    name = "model.layers.11.self_attn.q_norm.weight"
    assert adapter.from_hf_name(name) == "layers.11.attention.q_norm.weight"
    assert adapter.to_hf_name("layers.11.feed_forward.w2.weight").endswith(
        "11.mlp.down_proj.weight"
    )


def test_a_tied_head_is_not_loaded_and_an_untied_one_is():
    assert tiny_model(tie_word_embeddings=True).adapter.from_hf_name("lm_head.weight") is None
    untied = tiny_model(tie_word_embeddings=False)
    assert untied.adapter.from_hf_name("lm_head.weight") == "output.weight"
    assert untied.output_weight is untied.output.weight


def test_unknown_names_are_refused():
    model = tiny_model("llama")
    for name in ["model.layers.0.self_attn.q_norm.weight", "transformer.h.0.weight"]:
        with pytest.raises(ValueError, match="unknown weight name"):
            model.load_hf_tensor(name, torch.zeros(1))
    with pytest.raises(ValueError, match="unknown weight name"):
        model.adapter.to_hf_name("layers.0.nothing.weight")


def test_load_one_tensor_casts_and_checks_its_shape():
    model = tiny_model()
    model.load_hf_tensor("model.norm.weight", torch.full((32,), 0.5, dtype=torch.float64))
    assert model.norm.weight.dtype == torch.float32 and bool((model.norm.weight == 0.5).all())
    assert model.norm.weight.requires_grad
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[1\], expected \[32\]"):
        model.load_hf_tensor("model.norm.weight", torch.zeros(1))
