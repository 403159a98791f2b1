"""A pipeline beyond parity: the order of its forward pass, what each rank holds, what it saves and
draws, and what it does about a gradient that is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.train.archon_world import loss_fn, make_batch, open_engine, train, weights_of
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tiny_model

from areal.api.config.train_engine import ArchonEngineConfig, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.train.pipeline import forward_waves, num_micro_batches
from areal.models.stage_layout import StageLayout

SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 9))
def test_a_forward_pass_computes_each_unit_once_after_the_one_before_it(name, num_ranks, num_mbs):
    layout = StageLayout.of(2 * num_ranks, num_ranks=num_ranks, schedule=name)
    when = {}
    for time, wave in enumerate(forward_waves(layout, num_mbs)):
        ranks = [layout.rank_of(stage) for stage, _ in wave]
        assert len(ranks) == len(set(ranks))
        when |= dict.fromkeys(wave, time)
    assert len(when) == layout.num_stages * num_mbs
    assert all(stage == 0 or when[stage - 1, mb] < when[stage, mb] for stage, mb in when)
    # No rank waits for longer than a micro-batch takes through the pipeline.
    assert max(when.values()) < layout.num_stages // num_ranks * (num_mbs + num_ranks)


def test_schedules_get_a_number_of_micro_batches_they_take():
    layout = StageLayout.of(9, num_ranks=3, schedule="1F1B")
    assert [num_micro_batches(n, "1F1B", layout) for n in (1, 3, 4)] == [3, 3, 4]
    assert [num_micro_batches(n, "ZBVZeroBubble", layout) for n in (1, 3, 4)] == [3, 3, 4]
    assert [num_micro_batches(n, "Interleaved1F1B", layout) for n in (1, 3, 4)] == [3, 3, 6]


def test_the_section_of_another_engine_is_refused():
    archon = ArchonEngineConfig(pp_schedule="1F1B")
    with pytest.raises(ValueError, match="archon needs backend archon"):
        TrainEngineConfig(path="m", backend="fsdp:d1", archon=archon)
    with pytest.raises(ValueError, match="pp_layers_per_stage"):
        ArchonEngineConfig(pp_layers_per_stage=0)


def test_a_backward_pass_in_two_parts_takes_no_recomputation():
    with pytest.raises(ValueError, match="enable_compile to false"):
        ArchonEngineConfig(pp_schedule="ZBVZeroBubble", enable_compile=True)
    archon = ArchonEngineConfig(pp_schedule="InterleavedZeroBubble")
    with pytest.raises(ValueError, match="gradient_checkpointing does not support"):
        TrainEngineConfig(path="m", archon=archon, gradient_checkpointing=True)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so, and computes
def test_two_stages_act_as_one_model(tmp_path):
    folder = str(write_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=4))
    found = run_ranks(2, "engine.train.test_pipeline:body", folder, str(tmp_path), timeout_s=900)
    assert [answers["place"] for answers in found] == [[0, 1, True], [0, 1, False]]
    names = [set(answers["names"]) for answers in found]
    one_rank = open_engine(folder, "archon:d1")
    assert names[0] | names[1] == dict(one_rank.model.named_parameters()).keys()
    assert not names[0] & names[1]
    for answers in found:
        assert answers["skipped"] == [0.0, False, True]
        assert "2 layers" in answers["too_few_layers"]

    saved = torch.load(tmp_path / "weights.pt")
    one_rank.load(SaveLoadMeta(path=str(tmp_path / "hf"), weight_format="hf"))
    assert all(torch.equal(saved["trained"][name], w) for name, w in one_rank.hf_weights())
    scratch = open_engine(folder, "archon:d1", init_from_scratch=True)
    assert all(torch.equal(saved["drawn"][name], w) for name, w in scratch.hf_weights())
    rounded = open_engine(folder, "archon:d1", dtype="bfloat16")
    # Equal roundings but for the order of sums of gradients.
    assert found[1]["bfloat16"] == pytest.approx(train(rounded, make_batch()), rel=1e-2)
    for name, weight in rounded.hf_weights():
        torch.testing.assert_close(saved["bfloat16"][name], weight, rtol=2e-2, atol=2e-3)


def body(folder: str, scratch: str) -> dict[str, Any]:
    engine, batch = open_engine(folder, "archon:p2", pp_schedule="ZBVZeroBubble"), make_batch()
    found: dict[str, Any] = {}
    found["place"] = [
        engine.data_parallel_rank,
        engine.data_parallel_world_size,
        engine.is_data_parallel_head(),
    ]
    found["names"] = list(engine.optimizer.masters())
    train(engine, batch)
    before = weights_of(engine)
    stats = train(engine, batch, lambda *args: loss_fn(*args) * math.inf)
    after = weights_of(engine)
    same = all(torch.equal(before[name], after[name]) for name in before)
    found["skipped"] = [stats["update_successful"], math.isfinite(stats["grad_norm"]), same]
    engine.save(SaveLoadMeta(path=str(Path(scratch) / "hf"), weight_format="hf"))

    drawn = open_engine(folder, "archon:p2", pp_schedule="1F1B", init_from_scratch=True)
    rounded = open_engine(folder, "archon:p2", dtype="bfloat16")
    found["bfloat16"] = train(rounded, batch)
    weights = {"trained": after, "drawn": weights_of(drawn), "bfloat16": weights_of(rounded)}
    if dist.get_rank() == 0:
        torch.save(weights, Path(scratch) / "weights.pt")
        write_tiny_model(Path(scratch) / "shallow", "qwen3")
    dist.barrier()
    try:
        open_engine(str(Path(scratch) / "shallow"), "archon:p2")
    except ValueError as error:
        found["too_few_layers"] = str(error)
    return found
