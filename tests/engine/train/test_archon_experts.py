"""Experts spread over ranks compute, learn and are saved as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.train.archon_world import assert_parity, make_batch, open_engine, train
from engine.train.test_archon_checkpoint import check as check_checkpoints
from gloo_ranks import run_ranks
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.engine.train.archon import ArchonEngine
from areal.models.hf_io import save_hf

WHOLE, CUT = "archon:d2t2e2", "archon:(attn:d2t2|ffn:t2e2)"  # experts of ranks of t


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe"))


@pytest.fixture(scope="module")
def one_sided(tmp_path_factory) -> str:
    """Every token goes to the second of four experts: none to the first, none to other ranks."""
    changes = {"use_expert_bias": True, "num_experts_per_tok": 1, "norm_topk_prob": False}
    model = tiny_model("qwen3_moe", **changes)
    for block in model.layers.values():
        block.feed_forward.router.expert_bias[1] = 100.0
    folder = tmp_path_factory.mktemp("one_sided")
    save_hf(model.named_hf_tensors(), tiny_config("qwen3_moe", **changes), folder)
    return str(folder)


def jobs_of(scratch: Path, *cases: tuple[str, str]) -> list[tuple[str, str, dict, str]]:
    return [(path, layout, {}, str(scratch / f"{i}.pt")) for i, (path, layout) in enumerate(cases)]


def test_two_ranks(folder, one_sided, tmp_path):
    shared = str(write_tiny_model(tmp_path / "shared", "deepseek_v2", q_lora_rank=9))
    folders = (folder, one_sided, shared)
    assert_parity(2, jobs_of(tmp_path, *((model, "archon:d2e2") for model in folders)))


@pytest.mark.slow
def test_two_ranks_of_other_axes(folder, one_sided, tmp_path):
    cut = "archon:(attn:t2|ffn:t2)"
    layouts = [(folder, "archon:t2e2"), (folder, "archon:c2e2"), (folder, cut), (one_sided, cut)]
    shared = str(write_tiny_model(tmp_path / "shared", "deepseek_v2", num_hidden_layers=4))
    layouts += [(shared, f"archon:{axis}2") for axis in ("d", "c", "p")]
    assert_parity(2, jobs_of(tmp_path, *layouts))


@pytest.mark.slow
def test_four_ranks(folder, one_sided, tmp_path):
    # Three experts on each rank of ep, which two shards cannot divide.
    uneven = str(write_tiny_model(tmp_path / "uneven", "qwen3_moe", num_experts=6))
    jobs = jobs_of(
        tmp_path,
        (folder, "archon:d4e2"),
        (folder, "archon:d4e4"),
        (folder, WHOLE),
        (folder, CUT),
        (uneven, "archon:d4e2"),
        (one_sided, WHOLE),
    )
    replicas = (folder, "archon:d4e2", {"num_replicas": 2}, str(tmp_path / "replicas.pt"))
    assert_parity(4, [*jobs, replicas])


def test_checkpoints_of_one_rank_and_of_spread_experts(folder, tmp_path):
    check_checkpoints(folder, tmp_path, 2, ["archon:d2e2", "archon:d2", "archon:t2e2"])


@pytest.mark.slow
def test_checkpoints_of_four_ranks(folder, tmp_path):
    check_checkpoints(folder, tmp_path, 4, ["archon:d4e2", CUT, "archon:d2t2e4", "archon:d4"])


def test_ranks_hold_their_experts_and_agree_on_the_balance(tmp_path):
    folder = str(write_tiny_model(tmp_path, "qwen3_moe", use_expert_bias=True))
    layouts = ["archon:d2e2", "archon:t2e2", "archon:t2"]
    found = run_ranks(
        2, "engine.train.test_archon_experts:balance_body", folder, layouts, timeout_s=900
    )
    expected = balance(open_engine(folder, "archon:d1"))
    assert any(map(any, expected))
    for rank_found in found:
        assert [biases for biases, _ in rank_found] == [expected] * len(layouts)
        assert [num_experts for _, num_experts in rank_found[:2]] == [2, 2]


def balance_body(folder: str, layouts: list[str]) -> list[list[Any]]:
    """Per layout: the biases after two steps, and of how many experts this rank has weights."""
    found = []
    for layout in layouts:
        engine = open_engine(folder, layout)
        biases = balance(engine)
        found.append([biases, len(engine.model.layers["0"].feed_forward.experts.w1.to_local())])
    return found


def balance(engine: ArchonEngine) -> list[list[float]]:
    """Rows and tokens divide evenly: no rank has to fill up, and fillers are routed too."""
    for seed in range(2):
        train(engine, make_batch(seed, lengths=(6, 6, 8, 8)))
    blocks = engine.model.layers.values()
    return [block.feed_forward.router.expert_bias.tolist() for block in blocks]
