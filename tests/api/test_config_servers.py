"""`rollout.backend: vllm:d1` and `sglang:d1`: what a config may ask of a stock server."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load


def test_the_chosen_section(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo", "rollout.backend=vllm:d1t2", "vllm.max_model_len=512")
    assert config.rollout.engine == "vllm" and config.rollout.tensor_parallel == 2
    assert config.server is config.vllm and config.server.max_context == 512
    config = load(tmp_path, "ppo", "rollout.backend=sglang:d1", "sglang.context_length=64")
    assert config.server is config.sglang and config.server.max_context == 64


def test_how_weights_may_reach_a_stock_server(tmp_path: Path) -> None:
    by_group = "actor.weight_update_mode=xccl"
    config = load(tmp_path, "ppo", "rollout.backend=vllm:d1", by_group)
    assert config.actor.weight_update_mode == "xccl"
    said = complaint(tmp_path, "ppo", "rollout.backend=sglang:d1", by_group)
    assert (
        "actor.weight_update_mode must be shm or disk when rollout.backend is 'sglang:d1': it "
        "loads weights only from a folder, got 'xccl'"
    ) in said
    for mode in ("direct", "ipc", "delta"):
        override = f"actor.weight_update_mode={mode}"
        said = complaint(tmp_path, "ppo", "rollout.backend=sglang:d1", override)
        assert "actor.weight_update_mode must be shm or disk when" in said
        said = complaint(tmp_path, "ppo", "rollout.backend=vllm:d1", override)
        assert "actor.weight_update_mode must be shm, disk or xccl when" in said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.recompute_kv=false", "rollout.recompute_kv must be true when"),
        ("native.batch_invariant=true", "native.batch_invariant must be false when"),
    ],
)
def test_what_a_stock_server_cannot_do(
    tmp_path: Path, engine: str, override: str, says: str
) -> None:
    assert says in complaint(tmp_path, "ppo", f"rollout.backend={engine}:d1", override)


@pytest.mark.parametrize("option", ["top_p=0.9", "top_k=20"])
def test_sglang_must_not_cut_what_is_trained_on(tmp_path: Path, option: str) -> None:
    name = option.partition("=")[0]
    said = complaint(tmp_path, "ppo", "rollout.backend=sglang:d1", f"gconfig.{option}")
    assert f"gconfig.{name} must be left out when rollout.backend is 'sglang:d1'" in said
    load(tmp_path, "ppo", "rollout.backend=vllm:d1", f"gconfig.{option}")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("vllm.gpu_memory_utilization=0", "gpu_memory_utilization must lie in (0, 1], got 0"),
        ("vllm.max_num_seqs=0", "vllm.max_num_seqs must be at least 1"),
        ("sglang.mem_fraction_static=1.5", "mem_fraction_static must lie in (0, 1], got 1.5"),
        ("vllm.python=$NOT_SET_ANYWHERE/python", "vllm.python uses $NOT_SET_ANYWHERE"),
    ],
)
def test_values_out_of_range(tmp_path: Path, override: str, says: str) -> None:
    assert says in complaint(tmp_path, "ppo", override)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_stock_server_needs_the_actor_in_the_controller(tmp_path, kind):
    ranks = ("actor.backend=archon:d2", "actor.weight_update_mode=disk")
    said = complaint(tmp_path, "ppo", f"rollout.backend={kind}:d1", *ranks)
    assert "actor.backend must be one rank in the controller" in said
    assert "rollout.backend=native:d1" in said


def test_other_models_may_stand_beside_a_stock_server(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo", "rollout.backend=vllm:d1", "actor.kl_ctl=0.1", "ref={}")
    assert config.hosts() == {"actor": "controller", "ref": "controller"}
