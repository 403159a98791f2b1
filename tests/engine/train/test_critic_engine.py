"""Archon with `is_critic`: values, their gradient, checkpoints; and rows that stay together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import draw_score_head, write_tiny_model
from transformers import AutoModel, AutoModelForSequenceClassification

from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.train.archon import ArchonEngine
from areal.engine.train.micro_batches import split_micro_batches

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)
SGD = OptimizerConfig(type="sgd", lr=0.1, beta1=0.0, weight_decay=0.0, gradient_clipping=1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def open_critic(path, seed: int = 1, **changes) -> ArchonEngine:
    options = {"optimizer": SGD, "is_critic": True, **changes}
    engine = ArchonEngine(TrainEngineConfig(path=str(path), **options), seed=seed)
    engine.initialize(FT_SPEC)
    return engine


def make_batch(lengths: tuple[int, ...] = (5, 9, 3, 7)) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 64, mask.shape, generator=gen, dtype=torch.int32) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": mask,
        "returns": torch.randn(mask.shape, generator=gen),
    }


def squared_error(values_T, mb):
    mask_T = mb["loss_mask"]
    return ((values_T - mb["returns"]) ** 2)[mask_T].mean()


def num_tokens(mb):
    return mb["loss_mask"].sum()


def reference_values(trunk, head_weight, batch) -> torch.Tensor:
    """[B, S] by transformers and one matrix product, one row at a time."""
    out = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        hidden = trunk(input_ids=batch["input_ids"][row : row + 1, :length].long())
        out[row, :length] = (hidden.last_hidden_state[0] @ head_weight.T)[:, 0]
    return out


def test_a_new_critic_has_no_opinion(folder):
    """GAE then credits the rewards alone, until the critic has learned something."""
    assert not open_critic(folder).forward_batch(make_batch()).any()


def test_values_equal_transformers(folder):
    engine, batch = open_critic(folder, mb_spec=MicroBatchSpec(max_tokens_per_mb=10)), make_batch()
    draw_score_head(engine.model)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference_values(trunk, engine.model.score.weight, batch)
    got = engine.forward_batch(batch)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (got[~batch["attention_mask"]] == 0).all()


def test_a_step_equals_plain_torch(folder):
    engine, batch = open_critic(folder, mb_spec=MicroBatchSpec(max_tokens_per_mb=10)), make_batch()
    draw_score_head(engine.model)
    head = engine.model.score.weight.detach().clone().requires_grad_()
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32)
    mask = batch["loss_mask"]
    errors = (reference_values(trunk, head, batch) - batch["returns"])[mask]
    loss = (errors**2).mean()
    loss.backward()

    stats = engine.train_batch(batch, squared_error, num_tokens)
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    weights = dict(engine.hf_weights())
    torch.testing.assert_close(weights["score.weight"], (head - 0.1 * head.grad).detach())
    norm = trunk.norm.weight
    torch.testing.assert_close(weights["model.norm.weight"], (norm - 0.1 * norm.grad).detach())


def test_checkpoints_of_a_critic(folder, tmp_path):
    engine, batch = open_critic(folder), make_batch()
    engine.train_batch(batch, squared_error, num_tokens)
    values = engine.forward_batch(batch)
    engine.save(SaveLoadMeta(path=str(tmp_path / "hf"), weight_format="hf"))
    engine.save(SaveLoadMeta(path=str(tmp_path / "dcp"), weight_format="dcp", with_optim=True))
    assert torch.equal(open_critic(tmp_path / "hf", seed=9).forward_batch(batch), values)

    resumed = open_critic(folder, seed=9)
    assert not torch.equal(resumed.forward_batch(batch), values)
    resumed.load(SaveLoadMeta(path=str(tmp_path / "dcp"), weight_format="dcp", with_optim=True))
    assert torch.equal(resumed.forward_batch(batch), values)

    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        score = theirs(input_ids=batch["input_ids"][:1, :5].long()).logits
    torch.testing.assert_close(score[0, 0], values[0, 4], rtol=1e-4, atol=1e-4)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=24).filter(lambda x: len(x) % 2 == 0),
    max_tokens=st.none() | st.integers(1, 30),
    n_mbs=st.integers(1, 5),
    algorithm=st.sampled_from(["ffd", "kk"]),
)
def test_pairs_are_neighbours_in_every_micro_batch(lengths, max_tokens, n_mbs, algorithm):
    spec = MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=max_tokens, packing_algorithm=algorithm)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mbs = split_micro_batches({"attention_mask": mask}, spec, torch.device("cpu"), 2)
    for mb in mbs:
        assert all(row % 2 == 0 for row in mb.rows[0::2])
        assert mb.rows[1::2] == [row + 1 for row in mb.rows[0::2]]
        assert mb.data["cu_seqlens"].diff().tolist() == [lengths[row] for row in mb.rows]
    assert sorted(row for mb in mbs for row in mb.rows) == list(range(len(lengths)))


def test_rows_that_make_no_units_are_refused():
    mask = torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="3 rows, which do not make units of 2"):
        split_micro_batches({"attention_mask": mask}, MicroBatchSpec(), torch.device("cpu"), 2)
