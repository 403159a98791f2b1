"""Whole PPO runs with critic, reference model and teacher: every role is used, saved, recovered."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_run import grpo_config, query

from areal.run.paths import RunPaths
from areal.trainer.experiment import load_datasets, run_experiment
from areal.trainer.rl_trainer import PPOTrainer

IN_PROCESS = (
    "actor.weight_update_mode=direct",
    "rollout.max_head_offpolicyness=0",
    "train_dataset.batch_size=3",
    "gconfig.n_samples=2",
    "total_train_steps=4",
    "actor.reward_norm=null",
)
PPO = (
    *IN_PROCESS,
    "critic={ppo_n_minibatches: 2, optimizer: {lr: 1.0e-3}}",
    "actor.gae_lambda=0.9",
    "actor.adv_norm={}",
    "ref={}",
    "actor.kl_ctl=0.1",
    "actor.kl_target=0.01",
    "actor.kl_horizon=20",
    "saver.freq_steps=2",
)


class Stop(Exception):
    """What ends a run in the middle."""


def run_until(config, last_step: int) -> None:
    def on_step(done: int, total: int, stats: object) -> None:
        if done == last_step:
            raise Stop

    with pytest.raises(Stop), PPOTrainer(config, *load_datasets(config)) as trainer:
        trainer.train(on_step=on_step)


def recover_state(paths: RunPaths) -> dict:
    newest = max(paths.recover.glob("step_*"), key=lambda path: int(path.name[5:]))
    return json.loads((newest / "state.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory):
    """(root, config, paths) of a PPO run with critic, reference model and adaptive KL."""
    root = tmp_path_factory.mktemp("ppo")
    config = grpo_config(root, *PPO, "trial_name=whole")
    run_experiment(config)
    return root, config, RunPaths.of(config)


def test_every_role_takes_part(ppo_run):
    _, _, paths = ppo_run
    steps = [json.loads(text) for (text,) in query(paths.root, "SELECT stats FROM steps")]
    assert len(steps) == 4
    for stats in steps:
        assert math.isfinite(stats["critic/loss"]) and stats["critic/grad_norm"] > 0
        assert math.isfinite(stats["actor/loss"])
    assert steps[0]["actor/kl_ref/avg"] == pytest.approx(0, abs=1e-4)  # both are the same model
    assert steps[-1]["actor/kl_ref/max"] > 0
    coefficients = [stats["actor/kl_ctl"] for stats in steps]
    assert coefficients[0] == pytest.approx(0.1) and len(set(coefficients)) == 4


def test_every_trained_role_is_saved(ppo_run):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    _, _, paths = ppo_run
    names = ["epoch0epochstep1globalstep1", "epoch0epochstep3globalstep3"]
    for role in ("actor", "critic"):
        assert sorted(path.name for path in (paths.checkpoints / role).iterdir()) == names
    assert not (paths.checkpoints / "ref").exists()
    AutoModelForCausalLM.from_pretrained(paths.checkpoints / "actor" / names[0])
    AutoModelForSequenceClassification.from_pretrained(paths.checkpoints / "critic" / names[0])


def test_a_resumed_run_ends_with_the_same_bits_in_every_role(ppo_run):
    root, _, whole = ppo_run
    config = grpo_config(root, *PPO, "trial_name=stopped")
    run_until(config, 3)  # the newest recover point is that of the second step
    paths = RunPaths.of(config)
    assert sorted(p.name for p in (paths.recover / "step_1").iterdir() if p.is_dir()) == [
        "actor",
        "critic",
    ]
    run_experiment(config)
    assert query(paths.root, "SELECT text FROM events WHERE kind = 'resumed'") == [("step 2",)]
    assert files(paths.checkpoints) == files(whole.checkpoints)
    assert recover_state(paths)["kl_control"] == recover_state(whole)["kl_control"]


def test_models_that_make_room_for_each_other_end_with_the_same_bits(ppo_run):
    root, _, whole = ppo_run
    offloaded = [f"{role}.offload=true" for role in ("actor", "critic", "ref")]
    config = grpo_config(root, *PPO, *offloaded, "trial_name=offloaded")
    run_experiment(config)
    paths = RunPaths.of(config)
    assert files(paths.checkpoints) == files(whole.checkpoints)
    steps = [json.loads(text) for (text,) in query(paths.root, "SELECT stats FROM steps")]
    assert all(stats["timeperf/onload"] > 0 and stats["timeperf/offload"] > 0 for stats in steps)


def test_a_run_does_not_go_on_with_other_models(ppo_run):
    root, config, _ = ppo_run
    without = [override for override in PPO if not override.startswith("critic=")]
    changed = grpo_config(root, *without, "trial_name=whole")
    with pytest.raises(
        ValueError, match=r"another config: critic.*critic\.path was '.*', now None"
    ):
        run_experiment(changed)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_teacher_is_learned_from(weight, tmp_path):
    teacher = f"{{path: {tmp_path}/teacher, rl_loss_weight: {weight}, distill_loss_weight: 0.5}}"
    options = (*IN_PROCESS, "recover.mode=off", f"teacher={teacher}", "actor.ppo_n_minibatches=1")
    from areal.cli.demo import make_model

    make_model(tmp_path / "teacher")
    config = grpo_config(tmp_path, *options)
    run_experiment(config)
    rows = query(
        RunPaths.of(config).root,
        "SELECT json_extract(stats, '$.\"actor/teacher_kl/avg\"') FROM steps",
    )
    # The teacher is the untrained student: at first there is nothing between them.
    assert len(rows) == 4 and rows[0][0] == pytest.approx(0, abs=1e-5)


def test_a_teacher_on_servers_teaches_what_one_of_the_run_does(tmp_path):
    from areal.cli.demo import make_model

    make_model(tmp_path / "teacher")
    base = (*IN_PROCESS, "recover.mode=off", "actor.ppo_n_minibatches=1", "total_train_steps=2")
    means = {}
    for kind in ("train", "rollout"):
        teacher = f"{{path: {tmp_path}/teacher, distill_loss_weight: 0.5, engine_type: {kind}}}"
        config = grpo_config(tmp_path, *base, f"teacher={teacher}", f"trial_name={kind}")
        run_experiment(config)
        rows = query(RunPaths.of(config).root, "SELECT stats FROM steps")
        names = ("actor/teacher_kl/avg", "actor/teacher_kl/max", "actor/loss")
        means[kind] = [[json.loads(text)[name] for name in names] for (text,) in rows]
    assert len(means["train"]) == 2 and means["train"][1][1] > 0
    for ours, theirs in zip(means["train"], means["rollout"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert (RunPaths.of(config).logs / "teacher_server0.log").is_file()
