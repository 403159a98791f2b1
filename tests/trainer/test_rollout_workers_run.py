"""Where episodes run changes nothing: a run with rollout workers trains on the same tokens."""

from __future__ import annotations

import pytest
from tiny_run import grpo_config, query

from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.mark.slow
def test_workers_give_the_trajectories_of_the_controller(tmp_path):
    trained, evaluated = [], []
    for workers in (0, 2):
        config = grpo_config(
            tmp_path,
            f"trial_name=workers{workers}",
            f"rollout.workers={workers}",
            "rollout.max_head_offpolicyness=0",
            "total_train_steps=2",
            "recover.freq_steps=1",
            "recover.keep=9",
            "evaluator.freq_steps=1",
        )
        run_experiment(config)
        root = RunPaths.of(config).root
        sql = "SELECT task_id, step, data FROM tasks JOIN trajectories USING (task_id)"
        trained.append(query(root, f"{sql} WHERE step > 0 ORDER BY task_id"))
        rewards = "json_extract(stats, '$.\"eval-rollout/reward\"')"
        evaluated.append([row[0] for row in query(root, f"SELECT {rewards} FROM steps")])
    assert len(trained[0]) == 8
    assert trained[0] == trained[1]
    assert len(evaluated[0]) == 2
    assert evaluated[1] == pytest.approx(evaluated[0]), "the workers' statistics arrive"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor.weight_update_mode", "direct"),
        ("rollout.agent.port", "8000"),
        ("rollout.agent.advertise_url", "http://here:8000"),
    ],
)
def test_workers_need_servers_and_proxies_of_their_own(tmp_path, key, value):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        grpo_config(tmp_path, "rollout.workers=2", f"{key}={value}")


def test_online_workers_of_several_machines_listen_for_others(tmp_path):
    several = ("rollout.workers=2", "rollout.agent.mode=online", "actor.weight_update_mode=disk")
    several += ("scheduler.type=ray", "cluster.n_nodes=2")
    with pytest.raises(ValueError, match=r"rollout\.agent\.host must be 0\.0\.0\.0"):
        grpo_config(tmp_path, *several)
    heard = ("rollout.agent.host=0.0.0.0", "rollout.agent.port=8700")
    config = grpo_config(tmp_path, *several, *heard)
    assert config.rollout.agent.port == 8700, "the router's"
