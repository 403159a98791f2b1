"""What tests of FSDPEngine share: engines by backend, a packed batch, a loss, its weights."""

from __future__ import annotations

import torch

from areal.algorithm.loss import sft_loss
from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import FinetuneSpec
from areal.engine import train_engine_class

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)
PLAIN_SGD = OptimizerConfig(type="sgd", lr=0.1, beta1=0.0, weight_decay=0.0, gradient_clipping=1e9)


def open_engine(folder, backend: str = "fsdp:d1", **changes) -> TrainEngine:
    options = {"optimizer": OptimizerConfig(lr=1e-2), **changes}
    config = TrainEngineConfig(path=str(folder), backend=backend, **options)
    engine = train_engine_class(backend)(config)
    engine.initialize(FT_SPEC)
    return engine


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (5, 9, 3, 7, 12, 2)) -> dict:
    gen = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, 64, mask.shape, generator=gen, dtype=torch.int32) * mask
    learn = mask.roll(-1, 1) & (torch.rand(mask.shape, generator=gen) < 0.7)
    learn[:, 0] = True
    learn[:, -1] = False
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": learn}


def loss_fn(logprobs, entropy, mb):
    return sft_loss(logprobs, mb["loss_mask"]) - 0.0 * entropy.sum()


def loss_tokens(mb):
    return mb["loss_mask"].sum()


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.hf_weights()}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    far = {name: (a[name] - b[name]).abs().max().item() for name in a}
    assert max(far.values()) <= atol, far
