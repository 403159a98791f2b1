"""`areal check` on configs with several models, and on those of reward models and DPO."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from config_files import FILES
from tiny import tiny_config

from areal.cli.main import main

KL = ("actor.kl_ctl=0.1", "ref={}")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a config per trainer and the model folder `tiny`."""
    monkeypatch.chdir(tmp_path)
    for trainer, text in FILES.items():
        (tmp_path / f"{trainer}.yaml").write_text(text.replace("path: tiny", "path: ./tiny"))
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config()))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return tmp_path


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]):
    def check(trainer: str, *overrides: str) -> tuple[int, str]:
        code = main(["check", f"{trainer}.yaml", *overrides])
        out, err = capsys.readouterr()
        line = (out or err).removesuffix("\n")
        assert "\n" not in line
        return code, line

    return check


def test_summary_names_every_model(check, project: Path) -> None:
    shutil.copytree(project / "tiny", project / "big")
    code, line = check("ppo", *KL, "critic={}", "teacher.path=./big")
    assert code == 0, line
    assert ", with ref ./tiny and critic ./tiny and teacher ./big, run folder" in line


@pytest.mark.parametrize(
    ("trainer", "summary"),
    [
        ("rw", "rw of ./tiny on Anthropic/hh-rlhf, 1 pairs a step, archon:d1, run folder runs/e/t"),
        (
            "dpo",
            "dpo of ./tiny on Anthropic/hh-rlhf, 1 pairs a step, archon:d1, with ref ./tiny, run",
        ),
        ("sft", "sft of ./tiny on arithmetic, 1 rows a step, archon:d1, run folder runs/e/t"),
    ],
)
def test_other_trainers(check, trainer: str, summary: str) -> None:
    code, line = check(trainer)
    assert code == 0, line
    assert summary in line


@pytest.mark.parametrize(
    ("trainer", "overrides", "says"),
    [
        ("ppo", ["actor.kl_ctl=0.1"], "ref must be set for a KL penalty"),
        ("ppo", ["critic.path=./none"], "critic.path: folder './none' does not exist"),
        ("ppo", ["teacher.path=ppo.yaml"], "teacher.path: 'ppo.yaml' is a file, expected a"),
        ("ppo", [*KL, "ref.path=./empty"], "ref.path: './empty' is not a model folder"),
        ("dpo", ["ref.path=./none"], "ref.path: folder './none' does not exist"),
        ("ppo", ["actor.gae_lambda=vap"], "actor.gae_lambda: unknown name 'vap' (did you mean"),
        ("ppo", ["actor.gae_lambda=no.such.fn"], "actor.gae_lambda: there is no module 'no.such'"),
        ("ppo", ["dynamic_bs=true"], "dynamic_bs needs dynamic_filter_fn"),
        ("ppo", ["dynamic_filter_fn=keep_mixed"], "(did you mean 'keep_mixed_groups'?)"),
        ("rw", ["actor.is_critic=false"], "actor.is_critic must be true: a reward model gives"),
        ("rw", ["train_dataset.path=gsm8k"], "train_dataset.path: unknown name 'gsm8k'"),
    ],
)
def test_refused_with_the_reason(
    check, project: Path, trainer: str, overrides: list[str], says: str
) -> None:
    (project / "empty").mkdir()
    code, line = check(trainer, *overrides)
    assert code == 2
    assert line.startswith("areal: error: ")
    assert says in line


def test_names_of_lambda_functions_and_filters(check) -> None:
    for override in ("actor.gae_lambda=vapo", "dynamic_filter_fn=keep_mixed_groups"):
        code, line = check("ppo", override)
        assert code == 0, line


def test_models_without_weights(check, project: Path) -> None:
    bare = project / "bare"
    shutil.copytree(project / "tiny", bare)
    (bare / "model.safetensors").unlink()
    _, line = check("ppo", "critic.path=./bare")
    assert line.endswith("set critic.init_from_scratch=true to begin with random ones")
    assert check("ppo", "critic={path: ./bare, init_from_scratch: true}")[0] == 0
    code, line = check("ppo", "teacher.path=./bare")  # a frozen model is never random
    assert (code, line.endswith("convert its weights to safetensors")) == (2, True)


def test_a_layout_must_find_experts_to_spread(check, project: Path) -> None:
    spread = ["actor.backend=archon:d2e2"]
    code, line = check("ppo", *spread)
    assert code == 2
    assert "actor.backend: 'archon:d2e2' with './tiny': the layout spreads experts, but" in line
    (project / "tiny" / "config.json").write_text(json.dumps(tiny_config("qwen3_moe")))
    assert check("ppo", *spread)[0] == 0
    code, line = check("ppo", "actor.backend=archon:d3e3")
    assert "num_experts of its config.json must be a multiple of 3, got 4" in line


def test_the_stages_of_megatron_are_equally_long(check, project: Path) -> None:
    write = lambda folder, layers: (project / folder / "config.json").write_text(  # noqa: E731
        json.dumps(tiny_config(num_hidden_layers=layers))
    )
    write("tiny", 6)
    keys = ["actor.backend=megatron:p2", "actor.kl_ctl=0.1"]
    stages = "actor.megatron.virtual_pipeline_parallel_size="
    assert check("ppo", *keys, f"{stages}3", "ref={}")[0] == 0
    code, line = check("ppo", *keys, f"{stages}2", "ref={}")
    assert code == 2
    assert "actor.backend: 'megatron:p2' with './tiny': p2 with megatron.virtual_pipe" in line
    assert "num_hidden_layers of its config.json must be a multiple of 4, got 6" in line
    shutil.copytree(project / "tiny", project / "odd")
    write("odd", 8)
    code, line = check("ppo", *keys, f"{stages}3", "ref.path=./odd")
    assert code == 2
    assert line.startswith("areal: error: ref.backend: 'megatron:p2' with './odd': p2 with")
    assert check("ppo", *keys, "actor.backend=archon:p3", "ref={}")[0] == 0  # takes other lengths


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["actor.backend=fsdp:d1"],
            "rollout.backend: 'native:d1' with './tiny': model_type 'olmo2' is not supported",
        ),
        ([], "actor.backend: 'archon:d1' with './tiny': model_type 'olmo2' is not supported"),
        (
            ["actor.backend=fsdp:d1", "rollout.backend=vllm:d1", *KL, "ref.backend=archon:d1"],
            "ref.backend: 'archon:d1' with './tiny': model_type 'olmo2' is not supported",
        ),
    ],
)
def test_a_family_that_an_engine_does_not_know(
    check, project: Path, overrides: list[str], says: str
) -> None:
    config = tiny_config() | {"model_type": "olmo2"}
    (project / "tiny" / "config.json").write_text(json.dumps(config))
    code, line = check("ppo", *overrides)
    assert code == 2
    assert says in line


def test_what_a_layout_cannot_compute(check) -> None:
    code, line = check("ppo", "actor.backend=archon:t2", "actor.archon.fp8_forward=true")
    assert code == 2
    assert "actor.archon.fp8_forward" in line and "archon:t2" in line


def test_megatron_without_its_package(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    code, line = check("sft", "actor.backend=megatron:d1")
    assert code == 2
    assert "needs the package megatron-core: pip install 'areal[megatron]'" in line


def test_broken_copy_is_named_with_its_role(check, project: Path) -> None:
    shutil.copytree(project / "tiny", project / "big")
    with (project / "big" / "model.safetensors").open("ab") as file:
        file.write(b"more")
    code, line = check("ppo", "teacher.path=./big")
    assert code == 2
    assert "teacher.path: big/model.safetensors has 14 bytes, expected 10" in line


def test_roles_must_share_a_vocabulary(check, project: Path) -> None:
    shutil.copytree(project / "tiny", project / "big")
    tokenizer = project / "big" / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}))
    assert check("ppo", "teacher.path=./big")[0] == 0
    tokenizer.write_text(json.dumps({"model": {"vocab": {"b": 0, "a": 1}}}))
    code, line = check("ppo", "teacher.path=./big")
    assert code == 2
    assert "teacher.path: big/tokenizer.json has another vocabulary than tiny/tokenizer" in line
