"""Faults known from another implementation that trainers, savers and timers here must not have."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import write_tiny_model
from tiny_ppo import GRPO, PLAIN_SGD, advantages, group, open_actor, open_engine
from tiny_run import grpo_config, query

from areal.api.config.run import StatsLoggerConfig
from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.run.database import RunDatabase
from areal.run.paths import RunPaths
from areal.run.trackers import open_trackers
from areal.trainer.base import Trainer
from areal.trainer.experiment import load_datasets, run_experiment
from areal.trainer.learners import PAIR, RWLearner
from areal.trainer.ppo.batch import collect, minibatches
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import stats_tracker

IN_PROCESS = (
    "actor.weight_update_mode=direct",
    "train_dataset.batch_size=3",
    "gconfig.n_samples=2",
    "total_train_steps=4",
)
WITH_CRITIC = ("actor.reward_norm=null", "critic={ppo_n_minibatches: 1}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def fresh_stats():
    stats_tracker.export()


def test_timers_in_seconds_work_without_torch_distributed(tmp_path):
    if torch.distributed.is_initialized():  # an engine of another test joined alone
        torch.distributed.destroy_process_group()
    soon = "{freq_steps: null, freq_secs: 1.0e-6}"
    config = grpo_config(
        tmp_path, *IN_PROCESS, f"saver={soon}", f"evaluator={soon}", "recover.freq_secs=1.0e-6"
    )
    run_experiment(config)
    paths = RunPaths.of(config)
    assert len(list((paths.checkpoints / "actor").iterdir())) == 4
    assert len(query(paths.root, "SELECT 1 FROM steps WHERE stats LIKE '%eval/reward%'")) == 4
    assert (paths.recover / "step_3").is_dir()


def test_a_batch_of_any_number_is_trained_on(folder):
    trajs = [group(2, [1, 2, 3], [1.0, 0.0, 0.0]), group(3, [4, 1], [0.0, 1.0], seed=1)]
    for num_groups, num_minibatches in ((2, 4), (1, 2), (2, 1), (1, 5)):
        actor = open_actor(folder, ppo_n_minibatches=num_minibatches, reward_norm=GRPO)
        data = advantages(actor, trajs[:num_groups])
        parts = [part["attention_mask"] for part in minibatches(data, (), num_minibatches)]
        assert sum(map(len, parts)) == len(data["attention_mask"])
        actor.ppo_update(data)
        assert stats_tracker.export()["actor/update_successful"] == 1


def test_dynamic_batches_of_a_run(tmp_path):
    config = grpo_config(
        tmp_path,
        *IN_PROCESS,
        *("dynamic_bs=true", "dynamic_filter_fn=keep_mixed_groups", "train_dataset.batch_size=5"),
    )
    seen = iter(range(10**6))

    def drop_every_third(trajectory: dict) -> bool:
        return next(seen) % 3 != 0

    sizes = []
    with PPOTrainer(config, *load_datasets(config)) as trainer:
        trainer.train(
            dynamic_filter_fn=drop_every_third,
            on_step=lambda done, total, stats: sizes.append(stats["rollout/samples"]),
        )
    assert len(sizes) == 4 and all(0 < size <= 10 for size in sizes)
    assert any(size < 10 for size in sizes)


def test_pairs_are_not_torn_apart(folder):
    """Lengths that any sort would mix; the loss sees each chosen answer beside its rejected one."""
    rows = [
        {"chosen_ids": [2 + i] * long, "rejected_ids": [32 + i] * short, "prompt_len": 1}
        for i, (long, short) in enumerate([(9, 2), (3, 8), (5, 5), (2, 11), (7, 1)])
    ]
    spec = MicroBatchSpec(max_tokens_per_mb=14)
    optimizer = OptimizerConfig(**PLAIN_SGD)
    config = TrainEngineConfig(path=str(folder), is_critic=True, optimizer=optimizer, mb_spec=spec)
    engine = open_engine(config)
    batch = RWLearner(engine).collate(rows)
    pairs = []

    def loss_fn(values_T, mb):
        firsts = mb["input_ids"][mb["cu_seqlens"][:-1].long()].tolist()
        pairs.extend(zip(firsts[0::2], firsts[1::2], strict=True))
        return values_T.sum()

    engine.train_batch(batch, loss_fn, lambda mb: torch.tensor(1), rows_per_unit=PAIR)
    assert sorted(pairs) == [(2 + i, 32 + i) for i in range(len(rows))]


def test_roles_do_not_share_a_frequency_counter(tmp_path):
    config = grpo_config(tmp_path, *IN_PROCESS, *WITH_CRITIC, "saver.freq_steps=2")
    run_experiment(config)
    checkpoints = RunPaths.of(config).checkpoints
    for role in ("actor", "critic"):
        saved = sorted(path.name for path in (checkpoints / role).iterdir())
        assert [name.split("globalstep")[1] for name in saved] == ["1", "3"]
    state = json.loads((RunPaths.of(config).recover / "step_3" / "state.json").read_text())
    assert {"saver.actor", "saver.critic"} <= state.keys()


def test_the_critic_is_recovered_and_looking_creates_nothing(tmp_path):
    config = grpo_config(tmp_path, *IN_PROCESS, *WITH_CRITIC, "recover.freq_steps=4")
    paths = RunPaths.of(config)
    with PPOTrainer(config, *load_datasets(config)) as trainer:
        assert trainer.run.resume() == 0
        assert not paths.recover.exists()
        trainer.train()
        trained = {k: v.clone() for k, v in trainer.learner.critic.engine.hf_weights()}
    with PPOTrainer(config, *load_datasets(config)) as trainer:
        fresh = dict(trainer.learner.critic.engine.hf_weights())
        assert not torch.equal(fresh["score.weight"], trained["score.weight"])
        assert trainer.run.resume() == 4
        assert trainer.learner.critic.engine.optimizer.lr_step == 4
        for name, weight in trainer.learner.critic.engine.hf_weights():
            assert torch.equal(weight, trained[name])


class FullDisk:
    """An engine that can be saved only so often."""

    def __init__(self, after: int) -> None:
        self.left = after

    def capture(self):
        self.left -= 1
        return self.write

    def write(self, path) -> None:
        if self.left < 0:
            raise OSError("No space left on device")


def test_a_recover_point_that_fails_leaves_the_one_before_it(tmp_path):
    config = grpo_config(tmp_path, *IN_PROCESS, *WITH_CRITIC, "recover.freq_steps=1")
    paths = RunPaths.of(config)
    with PPOTrainer(config, *load_datasets(config)) as trainer:
        trainer.run.roles.add("witness", FullDisk(after=2))
        with pytest.raises(OSError, match="No space left"):
            trainer.train()
    assert sorted(path.name for path in paths.recover.iterdir()) == ["step_0", "step_1"]
    run_experiment(config)
    assert query(paths.root, "SELECT text FROM events WHERE kind = 'resumed'") == [("step 2",)]


def test_versions_are_shifted_with_the_rest():
    traj = group(2, [3], [1.0])
    traj["versions"] = torch.tensor([[-1, -1, 4, 5, 6]], dtype=torch.int32)
    data = collect([traj])
    assert data["versions"][data["loss_mask"]].tolist() == [4, 5, 6]


def test_generation_goes_on_while_a_checkpoint_is_saved(tmp_path):
    """The tokenizer is written in the middle of a save: it asks for episodes and gets them."""
    config = grpo_config(tmp_path, *IN_PROCESS, "saver.freq_steps=2", "rollout.request_timeout=20")
    with PPOTrainer(config, *load_datasets(config)) as trainer:
        workflow = trainer._workflow(None, None, is_eval=True)
        tokenizer, answers = trainer.tokenizer, []

        class AskingTokenizer:
            def save_pretrained(self, path: str) -> None:
                rows = trainer.valid_dataset[:2]
                answers.extend(trainer.rollout.rollout_batch(rows, workflow))
                tokenizer.save_pretrained(path)

        trainer.tokenizer = AskingTokenizer()
        trainer.train(workflow=workflow)
    assert len(answers) == 2 * 3 and None not in answers  # two checkpoints and the final model


def test_the_longest_answer_is_not_taken_for_a_cut_off_one(folder):
    actor = open_actor(folder, mask_no_eos_with_zero=True)
    whole = group(2, [2, 5], [1.0, 1.0])
    assert advantages(actor, [whole])["tot_rewards"].sum(1).tolist() == [1.0, 1.0]
    values = torch.full((2, 7), 0.5)
    assert advantages(actor, [whole], values=values)["returns"][1, 5] == pytest.approx(1.0)


def test_m2po_keeps_the_denominator(folder):
    """Tokens that M2PO drops count as a loss of 0; the mean is still over all of them."""
    options = dict(use_decoupled_loss=True, ppo_n_minibatches=1, reward_norm=GRPO)
    losses = {}
    for name, threshold in (("all", 1e9), ("some", 0.02)):
        actor = open_actor(folder, **options, m2_threshold=threshold)
        data = advantages(actor, [group(2, [3, 4, 2], [1.0, 0.0, 0.2])])
        actor.ppo_update(data)
        stats = stats_tracker.export()
        losses[name] = stats["actor/loss"], stats["actor/rejected_ratio"], stats["actor/n_tokens"]
    assert losses["all"][1] == 0 < losses["some"][1] < 1
    assert losses["all"][2] == losses["some"][2] == 9

    mask = data["loss_mask"]
    moments = ((data["prox_logp"] - data["logprobs"]) ** 2)[mask]
    weight = (data["prox_logp"] - data["logprobs"]).exp()[mask]
    order = moments.argsort()
    kept = order[: round(9 * (1 - losses["some"][1]))]
    expected = -(weight * data["advantages"][mask])[kept].sum() / 9
    assert losses["some"][0] == pytest.approx(expected.item(), rel=1e-4)


def test_the_decoupled_loss_always_weighs_by_prox_over_behave(folder):
    options = dict(use_decoupled_loss=True, ppo_n_minibatches=1, reward_norm=GRPO)
    actor = open_actor(folder, **options)
    data = advantages(actor, [group(2, [3, 4], [1.0, 0.0])])
    actor.ppo_update(data)
    mask = data["loss_mask"]
    weight = (data["prox_logp"] - data["logprobs"]).exp()[mask]
    expected = -(weight * data["advantages"][mask]).mean().item()
    assert stats_tracker.export()["actor/loss"] == pytest.approx(expected, rel=1e-4)


def test_a_constructor_that_fails_shows_its_own_error_and_closes(tmp_path):
    config = grpo_config(tmp_path, *IN_PROCESS, *WITH_CRITIC)
    rows = load_datasets(config)
    config.critic.path = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        PPOTrainer(config, *rows)
    paths = RunPaths.of(config)
    paths.root.mkdir(parents=True, exist_ok=True)
    with RunDatabase(paths.database):  # its lock was given back
        pass


def test_a_fault_in_closing_does_not_hide_the_first_error(tmp_path):
    class Failing(Trainer):
        def _open(self, stack) -> None:
            stack.callback(self.fail, "closing failed")
            self.fail("opening failed")

        def fail(self, text: str) -> None:
            raise RuntimeError(text)

    class FailingToClose(Failing):
        def _open(self, stack) -> None:
            stack.callback(self.fail, "closing failed")

    config = grpo_config(tmp_path, *IN_PROCESS)
    rows = load_datasets(config)
    with pytest.raises(RuntimeError, match="opening failed"):
        Failing(config, *rows)
    with pytest.raises(KeyError, match="in the block"), FailingToClose(config, *rows):
        raise KeyError("in the block")
    with pytest.raises(RuntimeError, match="closing failed"), FailingToClose(config, *rows):
        pass


def test_trackers_that_are_off_are_not_opened(tmp_path):
    opened = open_trackers(
        StatsLoggerConfig(), experiment_name="e", trial_name="t", logs=tmp_path, run_config={}
    )
    assert opened == [] and list(tmp_path.iterdir()) == []
