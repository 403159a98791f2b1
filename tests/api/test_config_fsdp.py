"""Keys of backend fsdp: which are taken, and what refuses those its engine would not look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load


def test_fsdp_and_its_keys_are_taken(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "ppo",
        "actor.backend=fsdp:d1",
        "actor.use_lora=true",
        "actor.target_modules=[q_proj]",
        "actor.gradient_checkpointing=true",
        "actor.fsdp.offload_params=true",
        "actor.kl_ctl=0.1",
        "ref={}",
    )
    ref = config.ref.engine_config(config.actor)
    assert ref.backend == "fsdp:d1" and ref.fsdp.offload_params and not ref.use_lora
    archon_ref = load(
        tmp_path,
        "ppo",
        "actor.backend=fsdp:d1",
        "actor.fsdp.offload_params=true",
        "actor.kl_ctl=0.1",
        "ref.backend=archon:d1",
    )
    assert not archon_ref.ref.engine_config(archon_ref.actor).fsdp.offload_params


def test_a_reference_model_shares_prefixes_where_its_engine_can(tmp_path: Path) -> None:
    options = ("actor.enable_tree_training=true", "actor.kl_ctl=0.1", "ref.backend=")
    for backend, shares in {"fsdp:d1": True, "archon:p2": False, "megatron:d1": False}.items():
        config = load(tmp_path, "ppo", *options[:-1], options[-1] + backend)
        assert config.ref.engine_config(config.actor).enable_tree_training is shares


def test_stages_of_a_virtual_pipeline_are_the_reference_models_too(tmp_path: Path) -> None:
    keys = ["actor.backend=megatron:p2", "actor.megatron.virtual_pipeline_parallel_size=2"]
    keys += ["actor.kl_ctl=0.1"]
    for backend, num_stages in {"megatron:p2": 2, "megatron:d1": 1, "archon:p2": 1}.items():
        config = load(tmp_path, "ppo", *keys, f"ref.backend={backend}")
        ref = config.ref.engine_config(config.actor)
        assert ref.megatron.virtual_pipeline_parallel_size == num_stages


def test_megatron_is_taken_with_recomputation(tmp_path: Path) -> None:
    keys = ["actor.backend=megatron:d1", "actor.gradient_checkpointing=true"]
    assert load(tmp_path, "ppo", *keys).actor.gradient_checkpointing


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["actor.backend=fsdp:t2", "actor.use_lora=true"],
            "actor.use_lora cannot be sharded by t with backend fsdp",
        ),
        (["actor.backend=megatron:d1", "actor.dtype=float16"], "trains in bfloat16 or float32"),
        (["actor.backend=megatron:d1", "actor.use_lora=true"], "use_lora needs backend archon"),
        (["actor.backend=megatron:d1", "actor.optimizer.type=sgd"], "trains with adam"),
        (["actor.megatron.overlap=true"], "keys of actor.megatron are virtual_pipeline_parallel"),
        (["actor.megatron.virtual_pipeline_parallel_size=0"], "must be at least 1"),
        (
            ["actor.backend=archon:p2", "actor.megatron.virtual_pipeline_parallel_size=2"],
            "the section megatron needs backend megatron",
        ),
        (
            ["actor.backend=megatron:t2", "actor.megatron.virtual_pipeline_parallel_size=2"],
            "needs a pipeline: add p2 or more",
        ),
        (
            ["actor.use_lora=true", "actor.batch_invariant=true"],
            "actor.use_lora must be false with batch_invariant",
        ),
        (["actor.fsdp.offload_params=true"], "fsdp.offload_params needs backend fsdp"),
        (["actor.backend=fsdp:d1", "actor.batch_invariant=true"], "needs backend archon"),
        (
            ["actor.backend=megatron:d1", "actor.enable_tree_training=true"],
            "needs backend archon or fsdp",
        ),
        (
            ["actor.enable_tree_training=true", "actor.batch_invariant=true"],
            "enable_tree_training has no batch_invariant attention",
        ),
        (["actor.backend=fsdp:d1", "actor.target_modules=[q_proj]"], "needs use_lora: true"),
        (["actor.backend=fsdp:d1", "actor.lora_rank=0"], "lora_rank must be at least 1"),
    ],
)
def test_keys_without_effect_are_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)
