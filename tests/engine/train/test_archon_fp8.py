"""`archon.fp8_forward`: the trainer computes what a native server in FP8 computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.train.archon_world import make_batch, open_engine, own_rows
from gloo_ranks import run_ranks
from tiny import tiny_model, write_tiny_model

from areal.algorithm.loss import sft_loss
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    ArchonFP8Config,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec
from areal.engine.native.engine import NativeEngine
from areal.engine.train.archon import ArchonEngine
from areal.models.common.attention import PackedAttention
from areal.models.common.fp8 import FP8, dequantize, quantize_blocks
from areal.utils.data import select_rows

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)
ROUNDED = ArchonEngineConfig(fp8_forward=True)
TRAINED = {
    name: ArchonEngineConfig(
        fp8_forward=True, fp8_config=ArchonFP8Config(mode="blockwise", exclude_modules=excluded)
    )
    for name, excluded in {"in_fp8": [], "but_some": ["layers.0.", "w2"]}.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def open_one(folder, **changes) -> ArchonEngine:
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
    engine = ArchonEngine(TrainEngineConfig(path=str(folder), optimizer=optimizer, **changes))
    engine.initialize(FT_SPEC)
    return engine


def rows_of(batch) -> list[list[int]]:
    lengths = batch["attention_mask"].sum(1).tolist()
    return [row[:n].tolist() for row, n in zip(batch["input_ids"], lengths, strict=True)]


@pytest.mark.parametrize("archon", [ROUNDED, *TRAINED.values()], ids=["rounded", *TRAINED])
def test_logprobs_are_those_of_an_fp8_server_also_after_training(folder, archon):
    trainer, plain = open_one(folder, archon=archon), open_one(folder)
    server, batch = NativeEngine.from_pretrained(folder, dtype=FP8), make_batch()
    for version in (1, 2):
        expected = [one.logprobs for one in server.score(rows_of(batch))]
        found = trainer.forward_batch(batch)
        pairs = [(row[: len(other) - 1], torch.tensor(other[:-1]))
                 for row, other in zip(found, expected, strict=True)]  # fmt: skip
        assert_most_equal(*(torch.cat(part) for part in zip(*pairs, strict=True)))
        if version == 1:
            assert (found - plain.forward_batch(batch)).abs().max() > 0.05
        trainer.train_batch(batch, loss, lambda mb: mb["loss_mask"].sum())
        server.load_weights(trainer.hf_weights(), version, recompute_kv=True)


def assert_most_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """A sum that is off in its last bit may round to another FP8 value, and move what follows."""
    assert (found - expected).abs().median() < 1e-4
    assert (found - expected).abs().max() < 1.0


def loss(logprobs, entropy, mb):
    return sft_loss(logprobs, mb["loss_mask"])


def test_gradients_are_those_of_the_rounded_factors():
    """A layer: d(x W')/dW at rounded x and W, as if nothing had been rounded before them."""
    rounded, plain = tiny_model("llama"), tiny_model("llama")
    rounded.round_to_fp8()
    layer = rounded.layers["0"].feed_forward.w2
    x = torch.randn(7, layer.in_features, requires_grad=True)
    layer(x).square().sum().backward()
    near = [dequantize(*quantize_blocks(t.detach(), n), torch.float32) for t, n in
            ((x, 1), (layer.weight, 32))]  # fmt: skip
    factors = [t.requires_grad_() for t in near]
    (factors[0] @ factors[1].T).square().sum().backward()
    torch.testing.assert_close(x.grad, factors[0].grad)
    torch.testing.assert_close(layer.weight.grad, factors[1].grad)

    tokens, positions = torch.arange(9), torch.arange(9)
    attend = PackedAttention(torch.tensor([0, 9], dtype=torch.int32), 9)
    grads = []
    for model in (rounded.train(), plain.train()):
        model.zero_grad()
        logits = model.logits(model(tokens, positions, attend))
        logits.log_softmax(-1)[:, 3].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.cosine_similarity(*grads, dim=0) > 0.8


def logprobs_of_a_rank(folder: str, backend: str) -> list[list[float]]:
    engine = open_engine(folder, backend, archon=ROUNDED)
    return engine.forward_batch(own_rows(engine, make_batch())).tolist()


@pytest.mark.parametrize("backend", ["archon:d2", "archon:c2"])
def test_ranks_round_alike(folder, backend):
    target = "engine.train.test_archon_fp8:logprobs_of_a_rank"
    ranks = run_ranks(2, target, str(folder), backend)
    one, batch = open_one(folder, archon=ROUNDED), make_batch()
    step = 2 if backend == "archon:d2" else 1
    for place in range(step):
        mine = select_rows(batch, list(range(place, len(batch["input_ids"]), step)))
        real = mine["attention_mask"]
        found, expected = torch.tensor(ranks[place]), one.forward_batch(mine)
        assert_most_equal(found[real], expected[real])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_lora": True}, "use_lora must be false with archon.fp8_forward"),
        ({"batch_invariant": True}, "batch_invariant must be false with archon.fp8_forward"),
        ({"backend": "archon:t2", "weight_update_mode": "shm"}, "must be false with t or p"),
    ],
)
def test_what_it_cannot_be_combined_with(changes, says):
    with pytest.raises(ValueError, match=says):
        TrainEngineConfig(path="m", archon=ROUNDED, **changes)


@pytest.mark.parametrize("archon", [ROUNDED, TRAINED["but_some"]], ids=["rounded", "but_some"])
def test_what_only_rounds_is_not_compiled(archon):
    with pytest.raises(ValueError, match="enable_compile must be false with archon.fp8_forward"):
        TrainEngineConfig(path="m", archon=replace(archon, enable_compile=True))


@pytest.mark.slow
def test_compiled_blocks_train_in_fp8_as_others_do(tmp_path):
    """As a server in FP8 rounds."""
    folder, batch, found = write_tiny_model(tmp_path, num_hidden_layers=1), make_batch(), []
    for compiled in (False, True):
        trainer = open_one(folder, archon=replace(TRAINED["in_fp8"], enable_compile=compiled))
        trainer.train_batch(batch, loss, lambda mb: mb["loss_mask"].sum())
        found.append(trainer.forward_batch(batch))
    assert_most_equal(*found)


def test_experts_are_refused_by_the_key(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe")
    with pytest.raises(ValueError, match=r"archon.fp8_forward .* experts: set it to false"):
        open_one(folder, archon=ROUNDED)
