"""One-rank Archon: parity with transformers, invariance to micro-batching, skipping, resuming."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from areal.algorithm.loss import sft_loss
from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal.engine.train.archon import ArchonEngine
from areal.engine.train.micro_batches import split_micro_batches
from areal.engine.train.optimizer import lr_factor
from areal.utils import stats_tracker
from areal.weight_sync.publication import open_publication

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def open_engine(folder, *, optimizer: OptimizerConfig | None = None, **changes) -> ArchonEngine:
    optimizer = optimizer or OptimizerConfig(lr=1e-2)
    engine = ArchonEngine(TrainEngineConfig(path=str(folder), optimizer=optimizer, **changes))
    engine.initialize(FT_SPEC)
    return engine


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (5, 9, 3, 7, 12, 2)) -> dict:
    gen = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    # From 1: transformers gives the embedding of the pad token (0) no gradient.
    ids = torch.randint(1, 64, mask.shape, generator=gen, dtype=torch.int32) * mask
    # Aligned to predictions: the last position of a sequence predicts nothing.
    learn = mask.roll(-1, 1) & (torch.rand(mask.shape, generator=gen) < 0.7)
    learn[:, 0] = True
    learn[:, -1] = False
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": learn}


def loss_fn(logprobs, entropy, mb):
    return sft_loss(logprobs, mb["loss_mask"])


def loss_tokens(mb):
    return mb["loss_mask"].sum()


def weights_of(engine: ArchonEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.hf_weights()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def reference_logprobs(model, batch: dict, temperature: float) -> torch.Tensor:
    """[B, S] by transformers on the padded batch, one row at a time."""
    out = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][row : row + 1, :length].long()
        logp = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        out[row, : length - 1] = logp[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_transformers(folder, temperature: float):
    batch = make_batch()
    engine = open_engine(folder, temperature=temperature, logprobs_chunk_size=7)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference_logprobs(model, batch, temperature)
    predicts = batch["attention_mask"].roll(-1, 1)
    predicts[:, -1] = False
    got = engine.forward_batch(batch)
    torch.testing.assert_close(got * predicts, expected, rtol=1e-4, atol=1e-4)
    assert (got[~batch["attention_mask"]] == 0).all()


def test_entropies_beside_the_same_logprobs(folder):
    batch = make_batch()
    engine = open_engine(
        folder, temperature=0.6, logprobs_chunk_size=7, mb_spec=MicroBatchSpec(max_tokens_per_mb=13)
    )
    both_BS2 = engine.forward_batch(batch, with_entropy=True)
    assert torch.equal(both_BS2[..., 0], engine.forward_batch(batch))
    assert (both_BS2[~batch["attention_mask"]] == 0).all()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = batch["input_ids"][0, : int(batch["attention_mask"][0].sum())].long()
    with torch.no_grad():
        logp = (model(input_ids=ids[None]).logits[0, :-1] / 0.6).log_softmax(-1)
    expected = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(both_BS2[0, : len(expected), 1], expected, rtol=1e-4, atol=1e-4)


def test_loss_gradient_and_step_equal_plain_torch(folder):
    batch = make_batch()
    sgd = OptimizerConfig(type="sgd", lr=0.1, beta1=0.0, weight_decay=0.0, gradient_clipping=1e9)
    engine = open_engine(folder, optimizer=sgd)
    stats = engine.train_batch(batch, loss_fn, loss_tokens)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = batch["loss_mask"]
    loss = -(reference_logprobs(model, batch, 1.0) * mask).sum() / mask.sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, weight in engine.hf_weights():
        expected = model.get_parameter(name).detach() - 0.1 * grads[name]
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        MicroBatchSpec(max_tokens_per_mb=1),
        MicroBatchSpec(max_tokens_per_mb=13),
        MicroBatchSpec(n_mbs=3, packing_algorithm="kk"),
    ],
)
def test_the_update_does_not_depend_on_micro_batches(folder, spec: MicroBatchSpec):
    sgd = OptimizerConfig(type="sgd", lr=1.0, gradient_clipping=1e9)
    whole, cut = (
        open_engine(folder, optimizer=sgd),
        open_engine(folder, optimizer=sgd, mb_spec=spec),
    )
    batch = make_batch()
    torch.testing.assert_close(
        whole.eval_batch(batch, loss_fn, loss_tokens), cut.eval_batch(batch, loss_fn, loss_tokens)
    )
    one, many = (e.train_batch(batch, loss_fn, loss_tokens) for e in (whole, cut))
    assert one == pytest.approx(many, rel=1e-5)
    for (_, a), (_, b) in zip(whole.hf_weights(), cut.hf_weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.forward_batch(batch), cut.forward_batch(batch))


def test_a_gradient_that_is_not_finite_changes_nothing(folder):
    engine, batch = open_engine(folder), make_batch()
    engine.train_batch(batch, loss_fn, loss_tokens)
    before = weights_of(engine)

    def broken(logprobs, entropy, mb):
        return loss_fn(logprobs, entropy, mb) * float("inf")

    stats = engine.train_batch(batch, broken, loss_tokens)
    assert stats["update_successful"] == 0 and not math.isfinite(stats["grad_norm"])
    assert engine.optimizer.num_skipped_steps == 1
    assert_same_bits(weights_of(engine), before)
    assert engine.train_batch(batch, loss_fn, loss_tokens)["update_successful"] == 1


def test_clipping_bounds_the_step(folder):
    sgd = OptimizerConfig(type="sgd", lr=1.0, beta1=0.0, weight_decay=0.0, gradient_clipping=1e-3)
    engine = open_engine(folder, optimizer=sgd)
    before = weights_of(engine)
    assert engine.train_batch(make_batch(), loss_fn, loss_tokens)["grad_norm"] > 1e-2
    change = [(w - before[name]).norm() for name, w in engine.hf_weights()]
    assert torch.stack(change).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_training_is_deterministic_and_learns(folder):
    runs = []
    for _ in range(2):
        engine = open_engine(folder, mb_spec=MicroBatchSpec(max_tokens_per_mb=20))
        losses = [engine.train_batch(make_batch(), loss_fn, loss_tokens)["loss"] for _ in range(8)]
        runs.append((losses, weights_of(engine)))
    assert runs[0][0] == runs[1][0] and runs[0][0][-1] < 0.6 * runs[0][0][0]
    assert_same_bits(runs[0][1], runs[1][1])


@pytest.mark.parametrize(("kind", "beta1"), [("adam", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_a_resumed_run_ends_with_the_same_bits(folder, tmp_path, kind: str, beta1: float):
    optimizer = OptimizerConfig(
        type=kind, lr=1e-2, beta1=beta1, lr_scheduler_type="cosine", warmup_steps=2
    )

    def step(engine: ArchonEngine, number: int) -> None:
        engine.train_batch(make_batch(number), loss_fn, loss_tokens)
        engine.step_lr_scheduler()

    straight = open_engine(folder, optimizer=optimizer)
    for number in range(3):
        step(straight, number)
    straight.set_version(3)
    meta = SaveLoadMeta(path=str(tmp_path / "point"), weight_format="dcp", with_optim=True)
    straight.save(meta)
    resumed = open_engine(folder, optimizer=optimizer)
    resumed.load(meta)
    assert resumed.get_version() == 3 and resumed.optimizer.lr == straight.optimizer.lr
    for number in range(3, 6):
        step(straight, number)
        step(resumed, number)
    assert_same_bits(weights_of(straight), weights_of(resumed))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so, and computes
def test_bfloat16_keeps_float32_masters_through_save_and_load(folder, tmp_path):
    engine = open_engine(folder, optimizer=OptimizerConfig(lr=1e-6), dtype="bfloat16")
    masters = engine.optimizer.masters()
    before = {name: master.clone() for name, master in masters.items()}
    engine.train_batch(make_batch(), loss_fn, loss_tokens)
    assert any(not torch.equal(before[name], masters[name]) for name in masters)
    assert {w.dtype for _, w in engine.hf_weights()} == {torch.bfloat16}
    meta = SaveLoadMeta(path=str(tmp_path), weight_format="dcp", with_optim=True)
    engine.save(meta)
    other = open_engine(folder, dtype="bfloat16")
    other.load(meta)
    assert_same_bits(other.optimizer.masters(), masters)
    assert_same_bits(weights_of(other), weights_of(engine))


def test_hf_save_loads_in_transformers_and_in_a_new_engine(folder, tmp_path):
    engine = open_engine(folder)
    engine.train_batch(make_batch(), loss_fn, loss_tokens)
    engine.save(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in engine.hf_weights():
        assert torch.equal(model.get_parameter(name), weight)
    other = open_engine(folder)
    other.load(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    assert_same_bits(weights_of(other), weights_of(engine))


def test_hf_save_takes_files_beside_the_weights_from_where_it_is_told(folder, tmp_path):
    class Processor:
        def save_pretrained(self, path):
            (Path(path) / "preprocessor_config.json").write_text("{}")

    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").write_text('{"top_k": 7}')
    out = tmp_path / "out"
    meta = SaveLoadMeta(
        str(out), weight_format="hf", processor=Processor(), base_model_path=str(base)
    )
    open_engine(folder).save(meta)
    assert json.loads((out / "generation_config.json").read_text()) == {"top_k": 7}
    assert (out / "preprocessor_config.json").is_file()


class Receiver:
    """The part of an inference engine that receives weights; it remembers them."""

    def __init__(self) -> None:
        self.version, self.weights = 0, {}

    def update_weights(self, meta, named_tensors=None) -> None:
        source = open_publication(meta.path) if named_tensors is None else named_tensors
        self.weights = {name: tensor.clone() for name, tensor in source}
        self.version = meta.version


@pytest.mark.parametrize("kind", ["direct", "disk"])
def test_weights_reach_the_connected_engine(folder, tmp_path, kind: str):
    engine, receiver = open_engine(folder), Receiver()
    with pytest.raises(RuntimeError, match="connect_engine"):
        engine.update_weights(1)
    path = "" if kind == "direct" else str(tmp_path)
    engine.connect_engine(receiver, WeightUpdateMeta(type=kind, path=path))
    engine.train_batch(make_batch(), loss_fn, loss_tokens)
    engine.update_weights(7)
    assert receiver.version == 7
    assert_same_bits(receiver.weights, weights_of(engine))


def test_random_start_depends_on_the_seed_alone(folder):
    config = TrainEngineConfig(path=str(folder), init_from_scratch=True)
    engines = [ArchonEngine(config, seed=seed) for seed in (1, 1, 2)]
    for engine in engines:
        engine.initialize()
    first, same, other = (weights_of(engine) for engine in engines)
    assert_same_bits(first, same)
    name = "model.embed_tokens.weight"
    assert not torch.equal(first[name], other[name])


def test_misuse_is_named(folder, tmp_path):
    idle = ArchonEngine(TrainEngineConfig(path=str(folder)))
    with pytest.raises(RuntimeError, match="initialize"):
        idle.forward_batch(make_batch())
    idle.initialize()
    with pytest.raises(RuntimeError, match="optimizer section"):
        idle.train_batch(make_batch(), loss_fn, loss_tokens)
    engine, batch = open_engine(folder), make_batch()
    with pytest.raises(ValueError, match="no token to learn from"):
        engine.train_batch(batch | {"loss_mask": batch["loss_mask"] & False}, loss_fn, loss_tokens)
    with pytest.raises(ValueError, match="dcp"):
        engine.save(SaveLoadMeta(path=str(tmp_path), weight_format="hf", with_optim=True))


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    other = write_tiny_model(tmp_path / "wide", "qwen3", hidden_size=16)
    meta = SaveLoadMeta(path=str(tmp_path / "point"), weight_format="dcp", with_optim=True)
    open_engine(other).save(meta)
    with pytest.raises(ValueError, match="not a checkpoint of this model"):
        open_engine(folder).load(meta)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.1 + 0.9 * (0.5 + 0.5**1.5), 0.55, 0.231802, 0.1]),
    ],
)
def test_lr_schedules_by_hand(kind: str, expected: list[float]):
    options = dict(kind=kind, total_steps=6, warmup_steps=2, min_lr_ratio=0.1)
    got = [lr_factor(step, **options) for step in range(7)]
    assert got == pytest.approx(expected, rel=1e-5)
    assert lr_factor(99, **options) == pytest.approx(expected[-1])


def test_outputs_without_padding(folder):
    engine, batch = open_engine(folder), make_batch()
    padded_BS = engine.forward_batch(batch)
    mask = batch["attention_mask"]
    torch.testing.assert_close(engine.forward(batch), padded_BS[mask], rtol=0, atol=0)
    rows = engine.forward(batch, output_seqlens=[1] * len(mask), aggregate_fn=torch.stack)
    torch.testing.assert_close(rows, padded_BS[:, :1], rtol=0, atol=0)


def test_an_update_from_its_parts(folder):
    whole, parts = open_engine(folder), open_engine(folder)
    batch = make_batch()
    whole.train_batch(batch, loss_fn, loss_tokens)
    mbs = split_micro_batches(batch, parts.mb_spec, parts.device)
    assert len(mbs) == 1

    def learn(factor: float):
        parts.forward_backward_batch(
            mbs, lambda index, *outputs: factor * loss_fn(*outputs, mbs[index].data), False
        )

    learn(100.0)
    parts.optimizer_zero_grad()
    learn(1.0)
    assert parts.optimizer_step()["update_successful"] == 1
    assert_same_bits(weights_of(whole), weights_of(parts))


def test_modes_change_nothing_and_statistics_are_exported(folder):
    engine, batch = open_engine(folder), make_batch()
    trained = engine.train().forward_batch(batch)
    assert torch.equal(engine.eval().forward_batch(batch), trained)
    stats_tracker.scalar(seen=2.0)
    assert engine.export_stats()["seen"] == 2.0
    assert "seen" not in engine.export_stats()
    with pytest.raises(RuntimeError, match="no inference engine is connected"):
        engine.rollout_batch([], workflow="rlvr")
