"""Qwen3.5: names of multimodal checkpoints, heads for further tokens, and what is recomputed."""

from __future__ import annotations

import pytest
import torch
from hf_twins import packed_logits, random_sequences
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model, write_tiny_model
from tiny_vision import write_tiny_vision_model

from areal.models import decoder_args
from areal.models.hf_io import build_model, load_hf, save_hf
from areal.models.parallelize import checkpoint_blocks

MTP = {
    "mtp.fc.weight": torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4),
    "mtp.layers.0.self_attn.q_proj.weight": torch.ones(5, 2, dtype=torch.bfloat16),
    "mtp.norm.weight": torch.zeros(3),
}


def add_mtp(folder) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **MTP}, file, metadata={"format": "pt"})


def test_the_language_model_of_a_multimodal_checkpoint_is_read(tmp_path):
    """Without a vision_config the tower is left where it is."""
    model = tiny_model("qwen3_5_text", tie_word_embeddings=False)
    nested = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in model.named_hf_tensors()
    }
    tower = {"model.visual.patch_embed.proj.weight": torch.ones(2, 3), **MTP}
    text = tiny_config("qwen3_5_text", tie_word_embeddings=False)
    architectures = ["Qwen3_5ForConditionalGeneration"]
    config = {"model_type": "qwen3_5", "architectures": architectures, "text_config": text}
    save_hf({**nested, **tower}.items(), config, tmp_path)
    again = build_model(tmp_path, device="cpu", dtype=torch.float32)
    load_hf(again, tmp_path)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_stacked_experts_of_a_checkpoint_are_read(tmp_path):
    model = tiny_model("qwen3_5_moe_text")
    one_by_one = dict(model.named_hf_tensors())
    stacked = {name: x for name, x in one_by_one.items() if ".experts." not in name}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([one_by_one[f"{stem}.{e}.{leaf}_proj.weight"] for e in range(4)])
            for leaf in ("gate", "up", "down")
        )
        stacked |= {f"{stem}.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.down_proj": down}
    save_hf(stacked.items(), tiny_config("qwen3_5_moe_text"), tmp_path)
    again = build_model(tmp_path, device="cpu", dtype=torch.float32)
    load_hf(again, tmp_path)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    del stacked["model.layers.1.mlp.experts.down_proj"]
    save_hf(stacked.items(), tiny_config("qwen3_5_moe_text"), tmp_path)
    with pytest.raises(ValueError, match=r"missing model.layers.1.mlp.experts.0.down_proj.weight"):
        load_hf(again, tmp_path)


def test_packed_sequences_have_the_logits_of_each_alone():
    model = tiny_model("qwen3_5_text")
    sequences = random_sequences(64, [1, 70, 3, 129, 64])
    with torch.no_grad():
        together = packed_logits(model, sequences)
        for tokens, logits in zip(sequences, together, strict=True):
            torch.testing.assert_close(logits, packed_logits(model, [tokens])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("mode", "option"), [("full", "op"), ("selective", "op")])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_recomputed_activations_give_the_same_gradients(family, mode, option):
    def gradients(recompute: bool) -> dict[str, torch.Tensor]:
        model = tiny_model(family).train()
        if recompute:
            checkpoint_blocks(model, mode, selective_option=option, compiled=False)
        logits = packed_logits(model, random_sequences(64, [5, 80]))
        sum(x.logsumexp(-1).sum() for x in logits).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    kept, recomputed = gradients(False), gradients(True)
    for name, grad in kept.items():
        torch.testing.assert_close(recomputed[name], grad, atol=1e-5, rtol=1e-5)


def test_the_published_shapes_are_read_from_their_defaults():
    args = decoder_args({"model_type": "qwen3_5_text", "tie_word_embeddings": True})
    assert args.attention_layers == tuple(range(3, 32, 4))
    assert (args.head_dim, args.rope_dim) == (256, 64)
    assert args.delta_args.widths == (2048, 2048, 4096)
    sparse = decoder_args({"model_type": "qwen3_5_moe_text"})
    assert sparse.expert_args.num_experts == 256 and sparse.expert_args.shared_gate
    vision = {"model_type": "qwen3_5", "text_config": {"hidden_size": 3584}, "vision_config": {}}
    seeing = decoder_args(vision)
    assert seeing.rope.axes[:6] == (0, 1, 2) * 2 and len(seeing.rope.axes) == 32
    assert seeing.rope.axes[30:] == (0, 1), "11 pairs of the row, 10 of the column"
    assert seeing.vision_args.placeholder_ids == (248053, 248054, 248056, 248057)
    assert (seeing.vision_args.position_side, seeing.vision_args.deepstack_layers) == (48, ())


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5"])
def test_trained_models_keep_the_heads_for_further_tokens(tmp_path, family):
    from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
    from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
    from areal.engine.train.archon import ArchonEngine

    write = write_tiny_vision_model if family == "qwen3_5" else write_tiny_model
    folder = write(tmp_path / "start", family)
    add_mtp(folder)
    engine = ArchonEngine(TrainEngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-2)))
    engine.initialize(FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1))
    engine.save(SaveLoadMeta(path=str(tmp_path / "end"), weight_format="hf"))
    saved = load_file(tmp_path / "end" / "model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    for name, tensor in MTP.items():
        assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor)
    assert not any(name.startswith("mtp.") for name, _ in engine.hf_weights())
