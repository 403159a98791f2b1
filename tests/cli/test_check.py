"""`areal check`: a good config gives one line that begins with ok, a bad one a line and exit 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_config
from tiny_vision import tiny_vision_config

from areal.cli.main import main

CONFIG = """
experiment_name: arithmetic
trial_name: check
cluster: {fileroot: runs}
train_dataset: {path: arithmetic, batch_size: 64}
gconfig: {n_samples: 8, max_new_tokens: 10}
rollout: {max_head_offpolicyness: 2}
actor:
  path: ./model
  reward_norm: {mean_level: group, std_level: group}
  optimizer: {lr: 1e-3}
"""


REWARDS = """\
import torch
def score(*args, **data): ...
def trl(prompts, completions, **kwargs): ...
def without_data(prompt, completions, prompt_ids, completion_ids): ...
"""
FUNCTIONS = """\
raise SystemExit("a check must not run this")
from my_loss import loss as renamed
from nowhere_at_all import loss as gone
def loss(inputs, *, floor): ...
def longer(context, longest): ...
made = make_loss()
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, a model, a small data set and a reward; the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "grpo.yaml").write_text(CONFIG)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config()))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text("{}\n" * 40)
    (tmp_path / "my_reward.py").write_text(REWARDS)
    (tmp_path / "my_loss.py").write_text(FUNCTIONS)
    (tmp_path / "my_workflow.py").write_text("class Sees: ...\n")
    return tmp_path


def check(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str]:
    """(exit code, the one line that was printed)."""
    code = main(["check", "grpo.yaml", *overrides])
    out, err = capsys.readouterr()
    line = (out or err).removesuffix("\n")
    assert not (out and err)
    assert "\n" not in line
    return code, line


def test_good_config_is_summed_up(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    before = sorted(project.rglob("*"))
    code, line = check(capsys)
    assert code == 0
    assert line == (
        "ok: grpo.yaml: ppo of ./model on arithmetic, 64 prompts x 8 samples a step, "
        "staleness at most 2, native:d1 + archon:d1, run folder runs/arithmetic/check, "
        "2 processes (controller + 1 inference) by local"
    )
    assert sorted(project.rglob("*")) == before


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer=sft", "~gconfig", "~rollout", "~actor.reward_norm"],
        ["train_dataset.path=./gsm8k", "train_dataset.batch_size=40"],
        ["train_dataset.path=openai/gsm8k"],
        ["train_dataset.path=areal.dataset.arithmetic.get_arithmetic_rl_dataset"],
        ["train_dataset.dataset_kwargs.loader=gsm8k", "train_dataset.path=org/renamed"],
        ["reward_fn=my_reward.score"],
        ["actor.policy_loss=my_loss.loss", "actor.policy_loss_kwargs={floor: -3}"],
        ["actor.policy_loss=my_loss.renamed", "actor.policy_loss_kwargs={floor: -3}"],
        ["actor.policy_loss=my_loss.made"],  # only importing it could tell
        ["actor.gae_lambda=my_loss.longer", "actor.gae_lambda_kwargs={longest: 3}"],
        ["reward_fn=math_verify", "workflow=areal.workflow.rlvr.RLVRWorkflow"],
        ["actor.init_from_scratch=true"],
        ["train_dataset.path=geometry3k", "workflow=my_workflow.Sees"],
        [
            "train_dataset.path=geometry3k",
            "workflow_kwargs={data_extract_prompt_fn: my_reward.score}",
        ],
        ["cluster.fileroot=new/folder"],
    ],
)
def test_good_variants(capsys: pytest.CaptureFixture[str], overrides: list[str]) -> None:
    code, line = check(capsys, *overrides)
    assert (code, line[:3]) == (0, "ok:"), line


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor.eps_clp=1", "actor.eps_clp: unknown key; did you mean actor.eps_clip?"),
        ("lr=1", "it belongs at actor.optimizer.lr"),
        ("seed=x", "seed must be a whole number, got 'x'"),
        ("actor.path=./nowhere", "actor.path: folder './nowhere' does not exist"),
        ("actor.path=model2", "'model2' does not exist (the name of a model on a hub is org/name)"),
        ("actor.path=Qwen/Qwen3-0.6B", "actor.path: Qwen/Qwen3-0.6B is not whole in the cache"),
        ("actor.path=grpo.yaml", "actor.path: 'grpo.yaml' is a file, expected a folder"),
        (
            "actor.path=./gsm8k",
            "actor.path: './gsm8k' is not a model folder: it has no config.json",
        ),
        ("tokenizer_path=./gsm8k", "tokenizer_path: './gsm8k' has no tokenizer"),
        ("train_dataset.path=./nowhere", "train_dataset.path: './nowhere' does not exist"),
        ("train_dataset.path=arithmetics", "(did you mean 'arithmetic'?)"),
        ("train_dataset.path=org/unknown", "set train_dataset.dataset_kwargs.loader"),
        ("train_dataset.path=./gsm8k", "64 is more than the 40 rows of gsm8k/train.jsonl"),
        ("reward_fn=gsm8", "reward_fn: unknown name 'gsm8' (did you mean 'gsm8k'?)"),
        ("reward_fn=my_rewards.score", "reward_fn: there is no module 'my_rewards'"),
        ("reward_fn=my_reward.scor", "did you mean my_reward.score?"),
        (
            "reward_fn=my_reward.trl",
            "reward_fn: my_reward.trl(prompts, completions, **kwargs) cannot be called as "
            "fn(prompt, completions, prompt_ids, completion_ids, **data) -> float: it takes 2 "
            "arguments by "
            "position, not 4; a reward gets one prompt and one completion",
        ),
        (
            "reward_fn=my_reward.without_data",
            "my_reward.without_data(prompt, completions, prompt_ids, completion_ids) cannot be "
            "called as fn(prompt, completions, prompt_ids, completion_ids, **data) -> float: it "
            "takes no keywords",
        ),
        ("actor.policy_loss=my_los.loss", "actor.policy_loss: there is no module 'my_los'"),
        ("actor.policy_loss=my_loss.los", "did you mean my_loss.loss?"),
        (
            "actor.policy_loss=my_loss.gone",
            "actor.policy_loss: there is no module 'nowhere_at_all'",
        ),
        (
            "actor.policy_loss=my_loss.loss",
            "actor.policy_loss: my_loss.loss(inputs, *, floor) cannot be called as fn(inputs, "
            "**policy_loss_kwargs): missing a required",  # the rest is Python's, by its version
        ),
        ("dynamic_filter_fn=my_loss.loss", "cannot be called as fn(trajectory): missing"),
        ("actor.gae_lambda=my_loss.longer", "cannot be called as fn(context, **gae_lambda_kwargs)"),
        ("workflow=rlv", "workflow: unknown name 'rlv' (did you mean 'rlvr'?)"),
        (
            "train_dataset.path=hiyouga/geometry3k",
            "train_dataset.path: the rows of 'hiyouga/geometry3k' have images, and workflow 'rlvr' "
            "reads text only",
        ),
        (
            "valid_dataset={path: clevr_count_70k}",
            "valid_dataset.path: the rows of 'clevr_count_70k' have images",
        ),
        (
            "workflow_kwargs={get_input_ids_fn: my.ids}",
            "workflow_kwargs.get_input_ids_fn: there is",
        ),
        ("eval_workflow=rlhf", "eval_workflow: unknown name 'rlhf'"),
        ("dynamic_filter_fn=keep", "dynamic_filter_fn: unknown name 'keep'; expected one of keep_"),
        ("cluster.fileroot=grpo.yaml/runs", "is a file, expected a folder"),
    ],
)
def test_bad_config_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    code, line = check(capsys, override)
    assert code == 2
    assert line.startswith("areal: error: ")
    assert says in line


def test_model_without_weights(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    (project / "model" / "model.safetensors").unlink()
    code, line = check(capsys)
    assert code == 2
    assert "set actor.init_from_scratch=true" in line
    assert check(capsys, "actor.init_from_scratch=true")[0] == 0


def test_tokenizer_without_chat_template(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    (project / "model" / "tokenizer_config.json").write_text("{}")
    code, line = check(capsys)
    assert code == 2
    assert "has no chat template; add chat_template.jinja" in line
    (project / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert check(capsys)[0] == 0


def test_no_heavy_package_is_imported() -> None:
    program = """
import sys
from areal.cli.main import main
code = main(["check", "--config", "grpo.yaml", "reward_fn=my_reward.score"])
heavy = ("torch", "transformers", "datasets", "fastapi", "numpy", "math_verify", "my_reward")
print(code, [name for name in heavy if name in sys.modules])
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_a_stock_server_needs_its_environment(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("AREAL_ENVS", str(tmp_path / "envs"))
    monkeypatch.delenv("AREAL_VLLM_PYTHON", raising=False)
    code, line = check(capsys, "rollout.backend=vllm:d1")
    assert code == 2 and "vllm.python" in line and "areal env create vllm" in line
    code, line = check(capsys, "rollout.backend=vllm:d1", f"vllm.python={sys.executable}")
    assert code == 0 and "vllm:d1 + archon:d1" in line


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.agent.tool_call_parser=abc"], "rollout.agent.tool_call_parser: unknown name"),
        (["rollout.agent.prefix_matcher=my.match"], "rollout.agent.prefix_matcher: there is no mo"),
        (["rollout.agent.mode=online"], "set the environment variable AREAL_ADMIN_API_KEY"),
    ],
)
def test_what_an_agent_needs(capsys, monkeypatch, overrides: list[str], says: str) -> None:
    monkeypatch.delenv("AREAL_ADMIN_API_KEY", raising=False)
    code, line = check(capsys, "workflow=my_workflow.Sees", *overrides)
    assert code == 2
    assert says in line


def test_agents_of_a_model_that_reads_text_get_no_images(capsys, monkeypatch, project: Path):
    monkeypatch.setenv("AREAL_ADMIN_API_KEY", "k" * 16)
    agent = "class Agent:\n    async def run(self, data, **kwargs): ...\n"
    (project / "my_agent.py").write_text(agent)
    says = "the model that the agents talk to, './model', reads text only"
    shown = ["workflow=my_agent.Agent", "train_dataset.path=clevr_count_70k"]
    for overrides in (shown, [*shown, "rollout.agent.mode=online"]):
        code, line = check(capsys, *overrides)
        assert code == 2 and "train_dataset.path: the rows of 'clevr_count_70k'" in line
        assert says in line
    code, line = check(capsys, "workflow=my_agent.Agent", "valid_dataset={path: clevr_count_70k}")
    assert code == 2 and "valid_dataset.path" in line and says in line
    assert check(capsys, "workflow=my_workflow.Sees", *shown[1:])[0] == 0  # nobody can know
    sees = tiny_vision_config("qwen2_5_vl")
    (project / "model/config.json").write_text(json.dumps(sees))
    code, line = check(capsys, *shown)
    assert says not in line


def test_a_key_without_effect_is_named_and_does_not_fail_the_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "areal.cli.main", "check", "grpo.yaml", "vllm.max_model_len=9"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("ok: ")
    assert "command line: vllm.max_model_len has no effect: rollout.backend is" in done.stderr
    assert check(capsys, "actor.sapo_tau_neg=2")[0] == 2
