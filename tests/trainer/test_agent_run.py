"""Whole asynchronous GRPO runs of an agent given by its import path, in each place it may run."""

from __future__ import annotations

import math

import pytest
from safetensors.torch import load_file
from tiny_run import grpo_config, query

from areal.agents.episode_log import FOLDER, read_episodes
from areal.rollout.failures import RolloutFailedError
from areal.rollout.ledger import Ledger
from areal.rollout.trajectory import decode
from areal.run.database import RunDatabase
from areal.run.paths import RunPaths
from areal.trainer.episodes import build_workflow
from areal.trainer.experiment import run_experiment
from areal.utils import stats_tracker
from areal.utils.tokenizer import load_hf_tokenizer

pytestmark = pytest.mark.usefixtures("forked_children")

STEPS, BATCH, GROUP = 3, 4, 2
SMALL = (
    f"total_train_steps={STEPS}",
    f"train_dataset.batch_size={BATCH}",
    f"gconfig.n_samples={GROUP}",
    "recover.mode=off",
    "actor.weight_update_mode=direct",
    "workflow=sample_agents.DigitShare",
)


@pytest.mark.parametrize(
    "mode, style",
    [
        ("inline", "individual"),
        pytest.param("subproc", "concat", marks=pytest.mark.slow),  # agents/ has the processes
    ],
)
def test_an_agent_trains(tmp_path, mode, style):
    config = grpo_config(
        tmp_path,
        *SMALL,
        "rollout.max_head_offpolicyness=1",
        f"rollout.agent.mode={mode}",
        "rollout.agent.subproc_max_workers=2",  # each imports the client of OpenAI
        f"rollout.agent.export_style={style}",
        "rollout.agent.turn_discount=0.5",
        "recover={mode: on, freq_steps: 1, keep: 9}",  # keeps trajectories
        "rollout.dump_to_file=true",
        "evaluator.freq_steps=3",
        "valid_dataset.dataset_kwargs={num_rows: 4}",
    )
    stats_tracker.export_all()  # what other episodes of this process have left
    run_experiment(config)
    paths = RunPaths.of(config)
    with RunDatabase(paths.database) as database:
        balance = Ledger(database).balance()
    assert balance["trained"] == balance["total"] == STEPS * BATCH
    keys = ("actor/loss", "rollout/failed", "rollout/num_turns", "eval/reward")
    picked = ", ".join(f"json_extract(stats, '$.\"{key}\"')" for key in keys)
    steps = query(paths.root, f"SELECT {picked} FROM steps ORDER BY step")
    assert [math.isfinite(loss) for loss, *_ in steps] == [True] * STEPS
    assert [failed for _, failed, _, _ in steps] == [0] * STEPS
    assert {turns for _, _, turns, _ in steps} <= {2, None}  # None: no episode ended in that step
    assert 0 <= steps[-1][3] <= 1
    rows = query(paths.root, "SELECT step, data FROM tasks JOIN trajectories USING (task_id)")
    assert rows
    for step, data in rows:
        check_group(decode(data), step, style)
    check_episodes(read_episodes(paths.logs))


def check_episodes(episodes):
    """Every training episode is kept for `areal export`, and only those."""
    assert len(episodes) >= STEPS * BATCH * GROUP
    assert {episode.sample for episode in episodes} == set(range(GROUP))
    for episode in episodes:
        first, second = episode.turns
        assert second.parent == first.id and first.reward == pytest.approx(second.reward / 2)
        assert second.messages == [*first.messages, first.reply, second.messages[-1]]


@pytest.mark.slow
def test_rollout_workers_keep_their_episodes(tmp_path):
    config = grpo_config(
        tmp_path,
        *SMALL,
        "actor.weight_update_mode=disk",
        "rollout.workers=2",
        "rollout.dump_to_file=true",
        "rollout.agent.turn_discount=0.5",
    )
    run_experiment(config)
    logs = RunPaths.of(config).logs
    check_episodes(read_episodes(logs))
    assert 1 <= len(list((logs / FOLDER).iterdir())) <= 2, "one file for each process"


def check_group(group, step, style):
    """Two calls per episode: two rows, the first worth half the second, or one of two turns."""
    rewards = group["rewards"]
    if style == "individual":
        assert len(rewards) == 2 * GROUP
        assert rewards[0::2].tolist() == pytest.approx((rewards[1::2] / 2).tolist())
        assert group["episode_ids"].tolist() == [0, 0, 1, 1]
    else:
        assert len(rewards) == GROUP
        assert group["turn_ids"].max() == 1
    ages = step - group["versions"][group["loss_mask"].bool()]
    assert ages.min() >= 0 and ages.max() <= 1


def test_the_same_run_again_is_bit_equal(tmp_path):
    """Seeds belong to the episode's calls, not to when they arrive at the server."""
    finals = []
    for trial in ("one", "two"):
        config = grpo_config(
            tmp_path, *SMALL, "rollout.max_head_offpolicyness=0", f"trial_name={trial}"
        )
        run_experiment(config)
        finals.append(load_file(RunPaths.of(config).model / "model.safetensors"))
    one, two = finals
    assert all(tensor.equal(two[name]) for name, tensor in one.items())


def test_an_agent_that_fails_stops_the_run_with_its_cause(tmp_path):
    config = grpo_config(
        tmp_path,
        *SMALL,
        "workflow=sample_agents.Broken",
        "workflow_kwargs={how: raise}",
        "rollout.request_retries=0",
        "rollout.max_head_offpolicyness=3",
    )
    with pytest.raises(RolloutFailedError, match="LookupError: the agent lost its way"):
        run_experiment(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        (["workflow=sample_agents.Broken"], "workflow_kwargs do not fit Broken: missing"),
        (["workflow=sample_agents.turns", "workflow_kwargs={a: 1}"], "is built already"),
        (["workflow=sample_agents.client_of"], "neither a RolloutWorkflow nor an agent"),
        (["rollout.agent.mode=online"], "AREAL_ADMIN_API_KEY"),
    ],
)
def test_workflows_that_cannot_be_built(tmp_path, changes, message, monkeypatch):
    monkeypatch.delenv("AREAL_ADMIN_API_KEY", raising=False)
    config = grpo_config(tmp_path, *SMALL, *changes)
    with pytest.raises(ValueError, match=message):
        build_workflow(config, load_hf_tokenizer(config.tokenizer_path), None, None, is_eval=False)


def test_online_runs_have_no_workflow(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_ADMIN_API_KEY", "x" * 16)
    config = grpo_config(tmp_path, *SMALL, "rollout.agent.mode=online")
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    with pytest.raises(ValueError, match="clients run the episodes; got 'rlvr'"):
        build_workflow(config, tokenizer, "rlvr", None, is_eval=False)
    build_workflow(config, tokenizer, None, None, is_eval=False).close()
