"""What a training step keeps, counted operation by operation, against what the planner says.

Every tensor that an operation returns is counted until its memory is freed. Norms stand for
themselves: a GPU computes one in a kernel that keeps its input, a CPU in several operations.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_config
from tiny_vision import IMAGE, image_row, tiny_vision_config
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from areal.api.config.train_engine import ArchonEngineConfig, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec
from areal.engine.train.archon import ArchonEngine
from areal.planner.devices import load_device
from areal.planner.engines import trainer_of
from areal.utils.data import MULTI_MODAL_KEY

CPU = replace(load_device("cpu"), library_gib=0.0)
NUM_ROWS, LENGTH = 2, 128
# Wide enough that activations are most of the memory.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "vocab_size": 64,
}
MODELS = {
    "qwen2": WIDE,
    "qwen3": WIDE,
    "qwen3_moe": WIDE | {"moe_intermediate_size": 48, "num_experts": 4},
    "deepseek_v2": WIDE
    | {
        "head_dim": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 48,
    },
}


class MemoryMeter(TorchDispatchMode):
    """Bytes of all storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result


class NormOfOneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, meter):
        with _disable_current_modes():
            out = F.layer_norm(x, x.shape[-1:], weight, None, eps)
        meter.count(out)
        ctx.save_for_backward(x, weight)
        ctx.meter = meter
        return out

    @staticmethod
    def backward(ctx, grad):
        _, weight = ctx.saved_tensors
        with _disable_current_modes():
            results = grad.clone(), torch.ones_like(weight)
        for result in results:
            ctx.meter.count(result)
        return *results, None, None


def open_engine(folder: Path, config: TrainEngineConfig, hf_config: dict[str, Any]) -> ArchonEngine:
    (folder / "config.json").write_text(json.dumps(hf_config))
    engine = ArchonEngine(config)
    engine.initialize(FinetuneSpec(total_train_epochs=1, dataset_size=1, train_batch_size=1))
    return engine


def text_batch() -> dict[str, Any]:
    shape = (NUM_ROWS, LENGTH)
    return {
        "input_ids": torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
    }


def measured_peak(engine: ArchonEngine, batch: dict[str, Any]) -> int:
    """Of one step."""
    meter = MemoryMeter()
    for module in engine.model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.forward = lambda x, norm=module: NormOfOneKernel.apply(
                x, norm.weight, norm.eps, meter
            )

    def step() -> None:
        engine.train_batch(batch, lambda logp, *_: logp.sum(), lambda mb: torch.tensor(1.0))

    step()
    for tensor in engine.model.parameters():  # float32: masters of their own
        meter.count(tensor.detach())
    for moments in engine.optimizer.moments().values():
        for tensor in moments.values():
            meter.count(tensor)
    with meter:
        step()
    return meter.peak


def engine_config(folder: Path, mode: str) -> TrainEngineConfig:
    return TrainEngineConfig(
        path=str(folder),
        init_from_scratch=True,
        optimizer=OptimizerConfig(lr=1e-3),
        gradient_checkpointing=mode != "none",
        archon=ArchonEngineConfig(ac_mode=mode),
        logprobs_chunk_size=64,
    )


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_the_peak_of_a_step_with_images_is_predicted(tmp_path, family, mode):
    wide = {"hidden_size": 64, "intermediate_size": 160}
    layers = {"num_hidden_layers": 6, "image_size": 64} if family == "gemma3" else {"depth": 6}
    hf_config = tiny_vision_config(family, **wide, **layers)
    if family == "gemma3":
        hf_config["mm_tokens_per_image"] = 64
    config = engine_config(tmp_path, mode)
    row = image_row(hf_config, [(16, 16)] * 2, seed=0)
    batch = {
        "input_ids": row.tokens[None],
        "attention_mask": torch.ones(1, len(row.tokens), dtype=torch.bool),
        MULTI_MODAL_KEY: [row.multi_modal_input()],
    }
    peak = measured_peak(open_engine(tmp_path, config, hf_config), batch)
    rank = trainer_of(config, hf_config, CPU).rank
    num_images = int((row.tokens == IMAGE).sum())
    rank = replace(rank, tokens=len(row.tokens), image_tokens=num_images)
    assert rank.memory("actor").peak == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_the_peak_of_a_step_is_predicted(tmp_path, family, mode):
    config, hf_config = engine_config(tmp_path, mode), tiny_config(family, **MODELS[family])
    peak = measured_peak(open_engine(tmp_path, config, hf_config), text_batch())
    trainer = trainer_of(config, hf_config, CPU)
    rank = replace(trainer.rank, tokens=NUM_ROWS * LENGTH)
    assert rank.memory("actor").peak == pytest.approx(peak, rel=0.05)
