"""Backend megatron in a pipeline, its stages one or several to a rank: what each holds, weights in
and out, the schedules' losses and gradients, and a resumed step. On CPUs (see cpu_megatron.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.train.cpu_megatron import on_cpu, open_cpu_engine
from engine.train.test_megatron_model import needs_megatron, write_model
from fsdp_world import loss_fn, loss_tokens, make_batch
from gloo_ranks import run_ranks

from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine import train_engine_class
from areal.engine.train.micro_batches import MicroBatch, OutputFn, split_micro_batches
from areal.engine.train.packing import token_outputs

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {"decoder_sparse_step": 2},  # stages with and without experts
}
TRAINED = "qwen2"  # whose head is the embedding, on another rank
TRAINING = {"optimizer": OptimizerConfig(lr=1e-2), "mb_spec": MicroBatchSpec(n_mbs=3)}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder of models with four layers, and what two ranks report of them."""
    needs_megatron()
    folder = tmp_path_factory.mktemp("world")
    for family, overrides in MODELS.items():
        written = write_model(folder / family, family, num_hidden_layers=4, **overrides)
        torch.save(written, folder / f"{family}.pt")
    target = "engine.train.test_megatron_pipeline:rank_reports"
    return folder, run_ranks(2, target, str(folder), timeout_s=900)


def rank_reports(folder: str) -> dict[str, Any]:
    with on_cpu():
        return {
            "wrong": [name for family in MODELS for name in round_trip(folder, family)],
            "layers": layers_of_stages(f"{folder}/{TRAINED}"),
            "interleaved": losses_and_gradients(folder, num_stages=2),
            "plain": losses_and_gradients(folder, num_stages=1),
            "resumed": resume(folder),
        }


def round_trip(folder: str, family: str) -> list[str]:
    """What comes out otherwise than it went in; a Hugging Face folder is written on the way."""
    engine = open_cpu_engine(f"{folder}/{family}", "megatron:d1p2", num_stages=2)
    written = torch.load(f"{folder}/{family}.pt") if dist.get_rank() == 0 else {}
    out = SaveLoadMeta(path=f"{folder}/{family}.out", weight_format="hf")
    engine.save(out)
    other = open_cpu_engine(
        f"{folder}/{family}", "megatron:d1p2", num_stages=2, init_from_scratch=True
    )
    before = dict(other.hf_weights())
    other.load(out)
    after = dict(other.hf_weights())
    assert all(not torch.equal(before[name], after[name]) for name in after if "q_proj" in name)
    assert after.keys() == written.keys()
    return [name for name in written if not torch.equal(after[name], written[name])]


def layers_of_stages(model: str) -> list[Any]:
    """Of each stage: whether it embeds, its layers, whether it has a head. A critic's the same."""
    found = []
    for options in ({}, {"is_critic": True}):
        engine = open_cpu_engine(model, "megatron:d1p2", num_stages=2, **options)
        stages = [
            [s.pre_process, [layer.layer_number - 1 for layer in s.decoder.layers], s.post_process]
            for s in engine.stages
        ]
        head = "score" if options else "output_layer"
        for stage, (embeds, _, has_head) in zip(engine.stages, stages, strict=True):
            own = {name.partition(".")[0] for name, _ in stage.named_parameters()}
            expected = [("decoder", True), ("embedding", embeds), (head, has_head)]
            assert own == {name for name, is_there in expected if is_there}
        found.append(stages)
    assert found[0] == found[1]
    return found[0]


def losses_and_gradients(folder: str, num_stages: int) -> dict[str, Any]:
    """Of three micro-batches, no multiple of the ranks, and of other lengths. The gradients are
    written by rank 0."""
    from areal.engine.train.megatron.weights import stream

    model = f"{folder}/{TRAINED}"
    engine = open_cpu_engine(model, "megatron:d1p2", num_stages=num_stages, **TRAINING)
    before = engine.forward_batch(make_batch()).tolist()
    mbs, mean_loss = micro_batches()
    losses = engine.forward_backward_batch(mbs, mean_loss, forward_only=False)
    gradients = dict(stream(engine.stages, lambda weight: weight.main_grad))
    if dist.get_rank() == 0:
        torch.save(gradients, f"{folder}/gradients{num_stages}.pt")
    engine.optimizer.forget_gradients()
    stats = engine.train_batch(make_batch(), loss_fn, loss_tokens)
    return {"before": before, "losses": [loss.item() for loss in losses], "stats": stats}


def micro_batches() -> tuple[list[MicroBatch], OutputFn]:
    mbs = split_micro_batches(make_batch(), TRAINING["mb_spec"], torch.device("cpu"))
    assert len(mbs) == 3 and len({len(mb.data["input_ids"]) for mb in mbs}) > 1
    total = sum(mb.data["loss_mask"].sum() for mb in mbs)

    def mean_loss(index: int, logprobs_T: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return -(logprobs_T * mbs[index].data["loss_mask"]).sum() / total

    return mbs, mean_loss


def resume(folder: str) -> list[str]:
    """Weights that differ when a step follows `save` and `load`; and who may not load it."""
    model, batch = f"{folder}/{TRAINED}", make_batch()
    engine, other = (
        open_cpu_engine(model, "megatron:d1p2", num_stages=2, **TRAINING) for _ in range(2)
    )
    engine.train_batch(batch, loss_fn, loss_tokens)
    place = SaveLoadMeta(path=f"{folder}/state", weight_format="dcp", with_optim=True)
    engine.save(place)
    other.load(place)
    for trained in (engine, other):
        trained.train_batch(batch, loss_fn, loss_tokens)
    ours, theirs = dict(engine.hf_weights()), dict(other.hf_weights())
    # As many tensors of the same shapes, but of other layers.
    plain = open_cpu_engine(model, "megatron:d1p2", num_stages=1, **TRAINING)
    with pytest.raises(ValueError, match="is not a checkpoint of this model and optimizer"):
        plain.load(place)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def test_stages_of_a_rank_come_from_all_over_the_model(world):
    _, reports = world
    assert [report["layers"] for report in reports] == [
        [[True, [0], False], [False, [2], False]],
        [[False, [1], False], [False, [3], True]],
    ]


def test_a_checkpoint_comes_out_of_all_stages_as_it_went_in(world):
    _, reports = world
    assert [report["wrong"] for report in reports] == [[], []]


@pytest.mark.parametrize(("schedule", "num_stages"), [("interleaved", 2), ("plain", 1)])
def test_losses_and_gradients_are_archons(world, schedule, num_stages):
    folder, reports = world
    archon = train_engine_class("archon:d1")(
        TrainEngineConfig(path=str(folder / TRAINED), **TRAINING)
    )
    archon.initialize()
    expected_BS = archon.forward_batch(make_batch())
    learnt = make_batch()["loss_mask"]
    mbs, mean_loss = micro_batches()
    losses = [
        mean_loss(index, *token_outputs(archon.model, mb.data, archon.config, None))
        for index, mb in enumerate(mbs)
    ]
    sum(losses).backward()
    for report in reports:  # both ranks are told
        found = report[schedule]
        found_BS = torch.tensor(found["before"])
        torch.testing.assert_close(found_BS[learnt], expected_BS[learnt], atol=1e-5, rtol=0)
        assert found["losses"] == pytest.approx([loss.item() for loss in losses], abs=1e-6)
        assert found["stats"]["loss"] == pytest.approx(sum(losses).item(), abs=1e-6)
        assert found["stats"]["update_successful"] == 1.0
    gradients = torch.load(folder / f"gradients{num_stages}.pt")
    squares = 0.0
    for name, weight in archon.model.named_parameters():
        squares += weight.grad.double().square().sum().item()
        for hf_name, gradient in archon.model.adapter.convert_single_to_hf(name, weight.grad):
            torch.testing.assert_close(gradients[hf_name], gradient, atol=1e-5, rtol=1e-4)
    # The head and the embedding are one weight: it counts once.
    assert reports[0][schedule]["stats"]["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)


def test_a_resumed_step_is_the_same_bit_by_bit(world):
    _, reports = world
    assert [report["resumed"] for report in reports] == [[], []]
