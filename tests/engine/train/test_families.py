"""Every family in both engines: the trainer computes the log-probabilities the native one drew."""

from __future__ import annotations

import pytest
import torch
from tiny import write_tiny_model

from areal.algorithm.loss import sft_loss
from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import GenRequest
from areal.engine.train.archon import ArchonEngine

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)
CASES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"use_expert_bias": True},
    "deepseek_v2": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "gemma3_text": {"final_logit_softcapping": 4.0},
}


def sample(engine: NativeEngine, prompt: list[int]):
    options = GenerationHyperparameters(max_new_tokens=30, ignore_eos=True, seed=0)
    engine.add(GenRequest("one", prompt, options))
    while True:
        for finished in engine.step():
            return finished


def trained_logprobs(trainer: ArchonEngine, tokens: list[int]) -> list[float]:
    ids = torch.tensor([tokens], dtype=torch.int32)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    return trainer.forward_batch(batch)[0].tolist()


@pytest.mark.parametrize("family", CASES)
def test_a_step_changes_both_engines_alike(family, tmp_path):
    folder = write_tiny_model(tmp_path / "start", family, **CASES[family])
    config = TrainEngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-2))
    trainer = ArchonEngine(config)
    trainer.initialize(FT_SPEC)
    native = NativeEngine.from_pretrained(folder, page_size=4, num_pages=60)
    prompt = [5, 9, 33, 2, 60, 17, 8, 41, 12, 3, 22]
    first = sample(native, prompt)

    def assert_agrees(done) -> None:
        logprobs = trained_logprobs(trainer, prompt + done.output_tokens)
        drawn = logprobs[len(prompt) - 1 : len(prompt) + 29]
        assert done.output_logprobs == pytest.approx(drawn, abs=1e-5)

    assert_agrees(first)
    ids = torch.tensor([prompt + first.output_tokens], dtype=torch.int32)
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask.clone()}
    batch["loss_mask"][:, -1] = False
    before = dict(trainer.hf_weights())
    before = {name: tensor.clone() for name, tensor in before.items()}
    for _ in range(2):
        trainer.train_batch(
            batch,
            lambda logprobs, entropy, mb: sft_loss(logprobs, mb["loss_mask"]),
            lambda mb: mb["loss_mask"].sum(),
        )
    moved = [name for name, tensor in trainer.hf_weights() if not torch.equal(tensor, before[name])]
    assert "model.embed_tokens.weight" in moved and "model.layers.1.mlp" in " ".join(moved)
    assert any(name.endswith("expert_bias") for name in moved) == (family == "qwen3_moe")
    native.load_weights(trainer.hf_weights(), 1, recompute_kv=True)
    again = sample(native, prompt)
    assert again.output_logprobs != first.output_logprobs
    assert_agrees(again)

    trainer.save(SaveLoadMeta(path=str(tmp_path / "end"), weight_format="hf"))
    saved = NativeEngine.from_pretrained(tmp_path / "end", page_size=4, num_pages=60)
    assert sample(saved, prompt).output_logprobs == again.output_logprobs
