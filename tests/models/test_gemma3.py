"""Gemma 3: parity with transformers, its config keys. With images: test_vision.py."""

from __future__ import annotations

import pytest
import torch
from hf_twins import assert_same_logits, packed_logits, random_sequences, twin_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_config, tiny_model

from areal.models import get_model_spec


def args_of(config: dict):
    return get_model_spec("gemma3_text").model_args_class.from_hf_config(config)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_small_configs_equal_transformers(data):
    kv_heads = data.draw(st.integers(1, 2))
    heads = kv_heads * data.draw(st.integers(1, 2))
    overrides = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "hidden_size": heads * data.draw(st.sampled_from([4, 12])),
        "head_dim": data.draw(st.sampled_from([2, 8, 10])),
        "num_hidden_layers": data.draw(st.integers(1, 5)),
        "query_pre_attn_scalar": data.draw(st.sampled_from([4, 8, 100])),
        "sliding_window": data.draw(st.sampled_from([1, 5, 16, 300])),
        "sliding_window_pattern": data.draw(st.integers(1, 4)),
        "rope_local_base_freq": data.draw(st.sampled_from([100.0, 1e4])),
        "rope_scaling": data.draw(st.sampled_from([None, {"rope_type": "linear", "factor": 8.0}])),
        "final_logit_softcapping": data.draw(st.sampled_from([None, 2.0])),
        "tie_word_embeddings": data.draw(st.booleans()),
    }
    ours, theirs = twin_models("gemma3_text", **overrides)
    assert_same_logits(
        ours, theirs, data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    )


def test_absent_keys_take_the_family_defaults():
    # As the text part of a published config: only what is not usual is there.
    args = args_of(
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        }
    )
    assert (args.vocab_size, args.n_heads, args.n_kv_heads, args.head_dim) == (262208, 8, 4, 256)
    assert args.windows[:7] == (1024,) * 5 + (None, 1024) and args.windows.count(None) == 5
    assert (args.rope.kind, args.rope.factor, args.rope.theta) == ("linear", 8.0, 1e6)
    assert (args.window_rope.kind, args.window_rope.theta) == ("default", 1e4)
    assert args.score_scale == 256**-0.5 and args.embedding_scale == 2560**0.5
    assert args.tie_word_embeddings and args.logit_softcap is None


def test_old_and_new_rope_spellings_mean_the_same():
    config = {k: v for k, v in tiny_config("gemma3_text").items() if not k.startswith("rope")}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": scaling}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, **scaling},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    }
    assert args_of(config | old) == args_of(config | new)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types must be .*chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must name all 3 layers, got 1"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        args_of(tiny_config("gemma3_text", **overrides))


def test_the_embedding_scale_is_rounded_to_the_dtype():
    model = tiny_model("gemma3_text", hidden_size=200).to(torch.bfloat16)
    tokens = torch.arange(64)
    scale = torch.tensor(200**0.5).to(torch.bfloat16)  # 14.125, not 14.142
    assert torch.equal(model.tok_embeddings(tokens), model.tok_embeddings.weight * scale)


def test_fresh_norms_change_nothing_but_the_length():
    norm = tiny_model("gemma3_text").norm
    x = torch.randn(5, 32)
    torch.testing.assert_close(norm(x), x / x.square().mean(-1, keepdim=True).sqrt())


def test_a_window_hides_what_lies_before_it():
    model = tiny_model("gemma3_text", sliding_window=4, sliding_window_pattern=100)
    (tokens,) = random_sequences(64, [40])
    changed = tokens.clone()
    changed[0] = (changed[0] + 1) % 64
    with torch.no_grad():
        before, after = (packed_logits(model, [x])[0] for x in (tokens, changed))
    # Three layers of 4 tokens reach 3 * 3 back.
    differs = (before != after).any(dim=1)
    assert bool(differs[:10].any()) and not bool(differs[10:].any())
