"""Real clients, unmodified: each plays episodes of three turns with a tool, and a step is trained.

`make test-agents` makes their environment, .venv-agents, and runs this. The model is tiny and was
taught to play (taught_model.py); server, sessions, clients and training are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from taught_model import QUESTION, STYLES, teach
from tiny_run import query

from areal import PPOTrainer
from areal.cli.train import load_config
from areal.rollout.ledger_balance import read_balance
from areal.run.database import open_read_only
from areal.run.paths import RunPaths
from areal.trainer.probe import MAX_NEW_TOKENS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM_FILES = ROOT / "tests/data/real_agents"
PYTHON = ROOT / ".venv-agents/bin/python"
pytestmark = pytest.mark.real_agents

SDKS = {
    "openai-chat": "players.OpenAIChat",
    "openai-responses": "players.OpenAIResponses",
    "anthropic": "examples.agents.with_anthropic.Guesser",
    "openai-agents": "examples.agents.with_openai_agents.Guesser",
    "langgraph": "examples.agents.with_langgraph.Guesser",
    "pydantic-ai": "players.PydanticAI",
    "smolagents": "players.Smolagents",
}
PROGRAMS = {
    "mini": [str(PYTHON), str(PROGRAM_FILES / "mini_swe.py"), "{prompt}"],
    "claude-agent-sdk": [str(PYTHON), str(PROGRAM_FILES / "claude_code.py"), "{prompt}"],
    "claude": "claude",
    "codex": "codex",
}
EPISODES = 2
ASK = "Find the number. {}"


class InEnvironment:
    """A player in the clients' own environment."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any
    ) -> float:
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), str(PROGRAM_FILES / "players.py"), self.name),
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": api_key,
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complained = await process.communicate(json.dumps(data).encode())
        if process.returncode != 0:
            raise RuntimeError(f"{self.name}: {complained.decode()[-3000:]}")
        return float(said.split()[-1])


@pytest.fixture(scope="session")
def taught(tmp_path_factory):
    return teach(tmp_path_factory.mktemp("taught"))


@pytest.mark.parametrize("client", SDKS)
def test_an_agent_of_an_sdk_is_trained(client, taught, tmp_path):
    style = STYLES.get(client, STYLES["sdk"])
    row = {
        "messages": [{"role": "user", "content": ASK.format(style.question)}],
        "answer": "75",
    }
    train(InEnvironment(SDKS[client]), row, taught, tmp_path, reward=0.5)


@pytest.mark.parametrize("client", PROGRAMS)
def test_an_agent_that_is_a_program_is_trained(client, taught, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from examples.agents.cli_agent import PROMPT, CliAgent

    (packages,) = PYTHON.parents[1].glob("lib/python*/site-packages")
    programs = (packages / "codex_cli_bin/bin", packages / "claude_agent_sdk/_bundled")
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, programs), os.environ["PATH"]]))
    style = STYLES[client.partition("-")[0]]
    agent = CliAgent(PROGRAMS[client], f"{PROMPT} {style.question.format('2026-01-02')}")
    row = {"messages": [{"role": "user", "content": QUESTION}], "answer": "75"}
    train(agent, row, taught, tmp_path, reward=1.0)


def test_a_client_from_outside_is_trained(taught, tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_ADMIN_API_KEY", "a secret of this test")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = subprocess.Popen(
        [str(PYTHON), str(ROOT / "examples/agents/online_client.py"), f"http://127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    row = {"messages": [{"role": "user", "content": ASK.format(STYLES["sdk"].question)}]}
    overrides = ("rollout.agent.mode=online", f"rollout.agent.port={port}")
    try:
        train(None, {**row, "answer": "50"}, taught, tmp_path, *overrides, turns=1, reward=1.0)
        said, _ = client.communicate(timeout=300)
    finally:
        client.kill()
    assert client.returncode == 0 and int(said.split()[0]) >= EPISODES


def train(
    agent: Any,
    row: dict[str, Any],
    model: Path,
    fileroot: Path,
    *overrides: str,
    reward: float,
    turns: int = 3,
) -> None:
    """One step over EPISODES episodes, and what must be true of it then."""
    config = load_config(
        [
            str(ROOT / "examples/agents/arithmetic_grpo.yaml"),
            f"cluster.fileroot={fileroot}",
            f"actor.path={model}",
            "actor.weight_update_mode=direct",
            "actor.reward_norm=null",  # equal rewards would have no advantage
            "actor.mb_spec.max_tokens_per_mb=65536",
            "actor.temperature=0.2",
            "gconfig.temperature=0.2",
            f"gconfig.n_samples={EPISODES}",
            "gconfig.max_new_tokens=64",
            "gconfig.max_tokens=65536",
            "train_dataset.batch_size=1",
            "valid_dataset=null",
            "rollout.max_head_offpolicyness=0",
            "rollout.agent.session_timeout_seconds=120",
            "workflow_kwargs={}",
            "total_train_steps=1",
            "evaluator={}",
            "recover={mode: off}",
            *overrides,
        ]
    )
    with PPOTrainer(config, [row], None) as trainer:
        trainer.train(workflow=agent)
    paths = RunPaths.of(config)
    with closing(open_read_only(paths.database)) as database:
        counts = read_balance(database)  # raises if the ledger is not balanced
    assert counts["trained"] == 1 and counts["failed"] == 0, counts
    ((text,),) = query(paths.root, "SELECT stats FROM steps")
    stats = json.loads(text)
    # The probe after the first update asks once more, unless the prompt is long.
    probed = stats["server/finished"] - turns * EPISODES
    assert stats["rollout/num_turns"] == turns and probed in (0, 1)
    assert stats["rollout/reward"] == reward
    assert stats["actor/update_successful"] == 1.0
    # Every token that was sampled is trained on, once, after the very tokens it was sampled after:
    # the trainer finds the probability that the sampler had.
    others = stats["server/tokens_generated"] - stats["actor/n_tokens"]
    assert probed <= others <= probed * MAX_NEW_TOKENS
    assert stats["actor/importance_weight/min"] > 0.999, stats["actor/importance_weight/min"]
    assert stats["actor/importance_weight/max"] < 1.001, stats["actor/importance_weight/max"]
