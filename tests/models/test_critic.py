"""A critic is the language model's trunk with a score head, and transformers reads it as such."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config, tiny_model, write_tiny_model
from transformers import AutoModel, AutoModelForSequenceClassification

from areal.models.common.attention import PackedAttention
from areal.models.hf_io import (
    SCORE_HEAD,
    build_model,
    critic_config,
    has_score_head,
    load_hf,
    save_hf,
)

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "gemma3_text", "qwen3_5_text")


def critic(family: str, **overrides):
    config = tiny_config(family, **overrides)
    return build_model(config, device="cpu", dtype=torch.float32, is_critic=True)


def values(model, ids: torch.Tensor) -> torch.Tensor:
    attend = PackedAttention(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
    with torch.no_grad():
        return model.values(model(ids, attend.positions_T, attend))


@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_a_transformers_trunk_with_a_linear_head(family, tmp_path):
    folder = write_tiny_model(tmp_path / "lm", family, seed=3)
    model = critic(family)
    model.init_weights(7)
    load_hf(model, folder, without=[SCORE_HEAD])
    head = torch.nn.Linear(32, 1, bias=False)
    head.weight.data.copy_(model.score.weight.data)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(2, 64, (11,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = head(trunk(input_ids=ids[None]).last_hidden_state)[0, :, 0]
    torch.testing.assert_close(values(model, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_critic_loads_in_transformers_and_here(tied, tmp_path):
    model = critic("qwen3", tie_word_embeddings=tied)
    model.init_weights(1)
    config = tiny_config("qwen3", tie_word_embeddings=tied)
    save_hf(model.named_hf_tensors(), critic_config(config), tmp_path)
    assert has_score_head(tmp_path)

    ids = torch.randint(2, 64, (9,), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        score = theirs.eval()(input_ids=ids[None]).logits
    assert score.shape == (1, 1)
    torch.testing.assert_close(values(model, ids)[-1], score[0, 0], rtol=1e-4, atol=1e-4)

    again = critic("qwen3", tie_word_embeddings=tied)
    load_hf(again, tmp_path)
    assert torch.equal(values(again, ids), values(model, ids))


def test_the_trunk_starts_like_the_language_models(tmp_path):
    lm, model = tiny_model("qwen3", seed=5, tie_word_embeddings=False), critic("qwen3")
    model.init_weights(5)
    ours = dict(model.named_hf_tensors())
    assert "lm_head.weight" not in ours and ours.pop(SCORE_HEAD).shape == (1, 32)
    theirs = dict(lm.named_hf_tensors())
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_fresh_head_values_nothing():
    """Values of a drawn head are larger than the rewards and drown them in the advantages."""
    model = critic("llama")
    model.init_weights(1)
    ids = torch.arange(2, 13)
    assert values(model, ids).abs().max() > 0.05
    model.init_score()
    assert torch.equal(values(model, ids), torch.zeros(len(ids)))


def test_models_of_the_other_kind_are_refused(tmp_path):
    lm = write_tiny_model(tmp_path / "lm", "qwen3", tie_word_embeddings=False)
    assert not has_score_head(lm)
    with pytest.raises(ValueError, match=r"missing score\.weight"):
        load_hf(critic("qwen3"), lm)
    model = critic("qwen3")
    model.init_weights(0)
    save_hf(model.named_hf_tensors(), critic_config(tiny_config("qwen3")), tmp_path / "critic")
    with pytest.raises(ValueError, match=r"unexpected score\.weight"):
        load_hf(tiny_model("qwen3"), tmp_path / "critic")
