"""`rollout.backend: vllm:dN` and `sglang:dN`: what a config may ask of stock servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load

from areal.infra.jobs import all_jobs, server_job


def test_the_chosen_section(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo", "rollout.backend=vllm:d1t2", "vllm.max_model_len=512")
    assert config.rollout.engine == "vllm" and config.rollout.tensor_parallel == 2
    assert config.server is config.vllm and config.server.max_context == 512
    config = load(tmp_path, "ppo", "rollout.backend=sglang:d1", "sglang.context_length=64")
    assert config.server is config.sglang and config.server.max_context == 64


def test_how_weights_may_reach_a_stock_server(tmp_path: Path) -> None:
    by_group = "actor.weight_update_mode=xccl"
    for engine in ("vllm", "sglang"):
        config = load(tmp_path, "ppo", f"rollout.backend={engine}:d1", by_group)
        assert config.actor.weight_update_mode == "xccl"
        for mode in ("direct", "ipc", "delta"):
            override = f"actor.weight_update_mode={mode}"
            said = complaint(tmp_path, "ppo", f"rollout.backend={engine}:d1", override)
            assert "actor.weight_update_mode must be shm, disk or xccl when" in said
    said = complaint(tmp_path, "ppo", "rollout.backend=sglang:d1p2", by_group)
    assert "its pipeline stages join no common process group, got 'xccl'" in said


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
@pytest.mark.parametrize("actor", ["archon:d2", "fsdp:d2t2", "megatron:d2p2"])
@pytest.mark.parametrize("placement", ["local", "ray"])
def test_a_fleet_of_stock_servers(tmp_path, kind, actor, placement):
    config = load(
        tmp_path,
        "ppo",
        f"rollout.backend={kind}:d3t2p2",
        "rollout.workers=2",
        f"actor.backend={actor}",
        "actor.weight_update_mode=disk",
        f"scheduler.type={placement}",
    )
    rollout = config.rollout
    assert (rollout.num_servers, rollout.tensor_parallel, rollout.pipeline_parallel) == (3, 2, 2)
    job = server_job(config)
    assert (job.replicas, job.default_gpus) == (3, 4)


def test_other_models_may_stand_beside_a_stock_server(tmp_path: Path) -> None:
    config = load(tmp_path, "ppo", "rollout.backend=vllm:d1", "actor.kl_ctl=0.1", "ref={}")
    assert config.hosts() == {"actor": "controller", "ref": "controller"}


ATTACHED = "rollout.api_url=[http://one:8000, two:8001]"
BY_DISK = "actor.weight_update_mode=disk"


@pytest.mark.parametrize("kind", ["native", "vllm", "sglang"])
def test_servers_that_somebody_else_runs(tmp_path: Path, kind: str) -> None:
    config = load(tmp_path, "ppo", f"rollout.backend={kind}:d2", ATTACHED, BY_DISK)
    assert config.rollout.addresses == ["one:8000", "two:8001"]
    assert [job.role for job in all_jobs(config)] == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([ATTACHED, BY_DISK], "rollout.backend must be 'native:d2' for the servers of api_url"),
        (["rollout.backend=vllm:d2t2", ATTACHED, BY_DISK], "backend must be 'vllm:d2' for the"),
        (["rollout.backend=vllm:d2", ATTACHED], "actor.weight_update_mode must be disk when"),
        (["rollout.api_url=[https://one:8000]"], "api_url must hold addresses like http://host"),
        (["rollout.api_url=[http://one]"], "api_url must hold addresses like http://host:8000"),
        (["rollout.api_url=[one:port]"], "api_url must hold addresses like http://host:8000"),
    ],
)
def test_attached_servers_are_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)


LORA = ["rollout.use_lora=true", "actor.use_lora=true"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.use_lora=true"], "rollout.use_lora must be false when actor.use_lora is"),
        (
            [*LORA, "rollout.backend=vllm:d1", "actor.weight_update_mode=xccl"],
            "actor.weight_update_mode must be shm or disk when rollout.use_lora is true",
        ),
        (
            [*LORA, "rollout.backend=sglang:d2", ATTACHED, BY_DISK],
            "rollout.use_lora must be false when rollout.api_url is set",
        ),
        (
            [*LORA, "rollout.backend=vllm:d1", "actor.lora_rank=513"],
            "actor.lora_rank must be at most 512 when vLLM serves the adapters",
        ),
        ([*LORA, "rollout.backend=native:d1t2"], "rollout.use_lora must be false when native"),
        ([*LORA, "rollout.lora_name=''"], "rollout.lora_name must not be empty"),
    ],
)
def test_adapters_that_cannot_be_served(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)


def test_options_that_are_only_passed_on(tmp_path: Path) -> None:
    options = ["sglang.chunked_prefill_size=-1", "sglang.max_prefill_tokens=4096"]
    options += ["sglang.disable_radix_cache=true", "sglang.extra_args=[--schedule-policy, lpm]"]
    config = load(tmp_path, "ppo", "rollout.backend=sglang:d1", "sglang.random_seed=7", *options)
    assert config.sglang.arguments == [
        *("--chunked-prefill-size", "-1", "--max-prefill-tokens", "4096", "--disable-radix-cache"),
        *("--schedule-policy", "lpm"),
    ]
    assert config.server.seed == 7
    assert load(tmp_path, "ppo", "rollout.backend=sglang:d1").sglang.arguments == []
    said = complaint(tmp_path, "ppo", "sglang.chunked_prefill_size=0")
    assert "sglang.chunked_prefill_size must be above 0, or -1 for whole prompts" in said
