"""`areal push`: the real client uploads a run's model to a hub on loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from loopback_hub import LoopbackHub
from tiny import write_tiny_model

from areal.api.cli_args import dump_yaml, experiment_class, load_expr_config
from areal.run.database import RunDatabase

GRPO = """\
experiment_name: numbers
trial_name: first
train_dataset: {path: openai/gsm8k, batch_size: 4}
gconfig: {n_samples: 2, max_new_tokens: 32}
actor:
  path: /home/someone/models/base
  reward_norm: {mean_level: group, std_level: group}
  optimizer: {lr: 1e-3}
"""


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        hub.tokens = {"hf_writes"}
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run as it is after its last step."""
    root = tmp_path / "numbers" / "first"
    root.mkdir(parents=True)
    file = tmp_path / "grpo.yaml"
    file.write_text(GRPO)
    config, _ = load_expr_config([str(file)], experiment_class([str(file)]))
    (root / "config.yaml").write_text(dump_yaml(config))
    with RunDatabase(root / "run.db") as database:
        for step in range(30):
            database.record_step(step, {"rollout/reward": step / 30, "loss": -0.5})
    write_tiny_model(root / "model", "qwen3")
    return root


def push(hub: LoopbackHub, home: Path, *argv: str | Path, token: str = "hf_writes"):
    # The hub's own protocol of chunks is not what the loopback hub speaks.
    quiet = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env = hub.env(home / "hf", HF_TOKEN=token, **quiet)
    command = [sys.executable, "-m", "areal.cli.main", "push", *map(str, argv)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def files_of(hub: LoopbackHub, repo: str) -> dict[str, bytes]:
    return hub.commits[repo][hub.branches[repo]["main"]]


def test_a_model_arrives_whole_with_its_card(hub, folder, tmp_path):
    done = push(hub, tmp_path, folder, "me/numbers")
    assert done.returncode == 0, done.stderr
    files = files_of(hub, "me/numbers")
    assert done.stdout.strip().endswith(f"/commit/{hub.branches['me/numbers']['main']}")
    model = {file.name: file.read_bytes() for file in (folder / "model").iterdir()}
    assert model.items() <= files.items()
    assert hub.private["me/numbers"] is True
    assert sum("/commit/" in request for request in hub.requests) == 1
    check_card(files["README.md"].decode())


def check_card(card: str) -> None:
    front = yaml.safe_load(card.split("---")[1])
    assert front["datasets"] == ["openai/gsm8k"] and "base_model" not in front
    assert "`base` after 30 steps of trainer `ppo` on `openai/gsm8k`" in card
    assert "/home/someone" not in card
    assert "| actor.optimizer.lr | 0.001 |" in card
    curve = [line for line in card.partition("## Curve")[2].splitlines() if line.startswith("| ")]
    assert curve[0] == "| step | rollout/reward | loss |" and len(curve) == 2 + 12
    assert curve[2] == "| 1 | 0 | -0.5 |" and curve[-1] == "| 30 | 0.9667 | -0.5 |"


def test_what_arrived_before_a_failure_is_not_sent_again(hub, folder, tmp_path):
    weights = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "model" / "other.safetensors").write_bytes(weights[::-1])
    hub.cut_uploads = 1
    failed = push(hub, tmp_path, folder, "me/numbers", "--public")
    assert failed.returncode != 0 and failed.stderr.startswith("areal: error: REPO: ")
    assert failed.stderr.count("\n") == 1 and "README.md" not in files_of(hub, "me/numbers")
    arrived = len(hub.lfs)
    before = sum(request.startswith("PUT") for request in hub.requests)
    assert push(hub, tmp_path, folder, "me/numbers").returncode == 0
    again = sum(request.startswith("PUT") for request in hub.requests) - before
    assert again == 2 - arrived
    assert hub.private["me/numbers"] is False
    assert files_of(hub, "me/numbers")["other.safetensors"] == weights[::-1]


@pytest.mark.parametrize(
    ("repo", "token", "says"),
    [
        ("numbers", "hf_writes", "REPO: 'numbers' is no repository of a hub: expected org/name"),
        ("me/numbers", "hf_reads", "set HF_TOKEN to a token that may write there"),
    ],
)
def test_a_name_or_token_that_is_wrong(hub, folder, tmp_path, repo, token, says):
    done = push(hub, tmp_path, folder, repo, token=token)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_a_run_without_a_model_is_refused(hub, folder, tmp_path):
    (folder / "model" / "model.safetensors").unlink()
    done = push(hub, tmp_path, folder, "me/numbers")
    assert done.returncode == 2 and "has no final model" in done.stderr
    done = push(hub, tmp_path, tmp_path, "me/numbers")
    assert done.returncode == 2 and "is not the folder of a run" in done.stderr
    assert not hub.requests


@pytest.mark.parametrize("content", [b"", b"actor: [1", b"\x80\xff"])
def test_a_damaged_config_is_one_line(hub, folder, tmp_path, content):
    (folder / "config.yaml").write_bytes(content)
    done = push(hub, tmp_path, folder, "me/numbers")
    assert done.returncode == 2 and "config.yaml is damaged" in done.stderr
    assert done.stderr.count("\n") == 1
