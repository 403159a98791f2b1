"""Recover points of whole runs: written beside training, all or nothing, of no other run."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from small_disk import fill, mounted
from tiny_run import grpo_config, query
from trainer.test_offline_runs import config_of

from areal.api.config.run import RecoverConfig
from areal.cli.demo import make_model
from areal.run.database import RunDatabaseError
from areal.run.fingerprint import run_identity
from areal.run.numerics import RandomStates
from areal.run.paths import RunPaths
from areal.run.recover import RecoverError
from areal.trainer.offline import SFTTrainer

ROWS = [{"input_ids": [1, 2 + i, 3], "loss_mask": [0, 1, 1]} for i in range(20)]


class Witness:
    """A role whose state is written when it is allowed to, but for one time that fails."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.allowed = threading.Event()
        self.writing = threading.Event()
        self.num_captured = 0
        self.fails_at = fails_at

    def capture(self):
        self.num_captured += 1
        return partial(self.write, self.num_captured)

    def write(self, number: int, path) -> None:
        self.writing.set()
        assert self.allowed.wait(300), "training waits for the write"
        if number == self.fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.mkdir()

    def load(self, meta) -> None: ...


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make_model(root / "tiny_model")
    return root


def sft(root, trial: str, **recover):
    config = config_of("sft", root, trial)
    config.saver.freq_steps = config.evaluator.freq_steps = None
    config.evaluator.eval_before_train = False
    config.recover = RecoverConfig(mode="on", **{"freq_steps": 3, **recover})
    return config


def open_trainer(config):
    return SFTTrainer(config, ROWS, ROWS[:2])


def point_names(config) -> list[str]:
    return sorted(path.name for path in RunPaths.of(config).recover.iterdir())


def test_steps_finish_while_a_point_is_written_and_the_end_waits_for_it(root):
    config = sft(root, "beside")
    witness, states = Witness(), []
    with open_trainer(config) as trainer:
        trainer.run.roles.add("witness", witness)

        def on_step(done, total, stats) -> None:
            if done == 4:
                assert witness.writing.wait(300)
            if done == 5:  # two steps after the point of the third was begun
                states.append(point_names(config))
                witness.allowed.set()

        trainer.train(on_step=on_step)
        assert trainer.run.total_steps == 8
    names = states[0]
    assert len(names) == 1 and names[0].startswith(".step_2.tmp-")
    assert point_names(config) == ["step_5", "step_7"]
    step_5 = json.loads((RunPaths.of(config).recover / "step_5" / "state.json").read_text())
    assert step_5["recover"]["steps"] == 0


def test_a_point_that_cannot_be_written_stops_the_run_at_the_next_step(root):
    config, witness = sft(root, "failing"), Witness(fails_at=2)
    witness.allowed.set()
    with open_trainer(config) as trainer:
        trainer.run.roles.add("witness", witness)
        says = "No space left.*stopped after step [78];.*step_2"  # the last step waits
        with pytest.raises(OSError, match=says) as error:
            trainer.train()
    assert error.value.errno == errno.ENOSPC
    assert point_names(config) == ["step_2"]
    with open_trainer(config) as trainer:
        trainer.train()
    root_of_run = RunPaths.of(config).root
    assert query(root_of_run, "SELECT text FROM events WHERE kind = 'resumed'") == [("step 3",)]
    assert query(root_of_run, "SELECT count(*) FROM steps") == [(8,)]


def test_a_disk_that_is_full_when_the_ledger_is_flushed_stops_the_run_in_order(root, tmp_path):
    """The log of writes has room for what is committed; the database behind it cannot grow."""
    with mounted(tmp_path / "disk") as disk:
        config = sft(root, "full", freq_steps=1)
        config.cluster.fileroot = str(disk)
        with open_trainer(config) as trainer:
            database, mebibyte = trainer.run.database, 1 << 20

            def on_step(done, total, stats) -> None:
                if done == 3:
                    trainer.run._recovery.wait()
                    database.record_event("large", "x" * (3 * mebibyte))
                    database.flush()
                    fill(disk / "ballast")
                    database.record_event("large", "x" * mebibyte)

            says = "cannot write run database.*full.*free disk space.*stopped after step.*step_2"
            with pytest.raises(RunDatabaseError, match=says):
                trainer.train(on_step=on_step)
        (disk / "ballast").unlink()
        with open_trainer(config) as trainer:
            trainer.train()
        run_dir = RunPaths.of(config).root
        assert query(run_dir, "SELECT text FROM events WHERE kind = 'resumed'") == [("step 3",)]


def test_damage_is_named_and_the_point_before_is_taken_only_when_asked(root):
    config = sft(root, "damaged", freq_steps=2)
    with open_trainer(config) as trainer:
        trainer.train()
    straight = (RunPaths.of(config).model / "model.safetensors").read_bytes()
    shard = RunPaths.of(config).recover / "step_7" / "actor" / "rank0.bin"
    data = bytearray(shard.read_bytes())
    data[random.Random(3).randrange(len(data))] ^= 16
    shard.write_bytes(data)
    with open_trainer(config) as trainer, pytest.raises(RecoverError) as error:
        trainer.train()
    assert "step_7 is damaged: actor/rank0.bin: its checksum differs" in str(error.value)
    assert "recover.on_damage=previous" in str(error.value)

    config.recover.on_damage = "previous"
    with open_trainer(config) as trainer:
        trainer.train()
    resumed = query(
        RunPaths.of(config).root, "SELECT text FROM events WHERE kind = 'resumed' ORDER BY id"
    )
    assert resumed == [("step 6",)]
    assert (RunPaths.of(config).model / "model.safetensors").read_bytes() == straight


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("actor.use_decoupled_loss=true", "actor.use_decoupled_loss was False, now True"),
        ("actor.importance_sampling_level=sequence", "importance_sampling_level was 'token'"),
        ("critic={ppo_n_minibatches: 1}", "critic.path was None"),
        ("actor.optimizer.type=sgd", "actor.optimizer.type was 'adam', now 'sgd'"),
        ("train_dataset.split=other", "train_dataset.split was 'train', now 'other'"),
        ("train_dataset.shuffle=false", "train_dataset.shuffle was True, now False"),
    ],
)
def test_a_run_with_another_algorithm_role_or_data_is_another_run(tmp_path, change, says):
    norms = "actor.reward_norm=null" if "critic" in change else "seed=1"
    before = run_identity(grpo_config(tmp_path, norms), 100)
    after = run_identity(grpo_config(tmp_path, norms, change), 100)
    changed = [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    assert any(says in line for line in changed), changed
    assert run_identity(grpo_config(tmp_path, norms), 99) != before


@pytest.mark.parametrize("change", ["actor.optimizer.lr=1.0e-6", "actor.eps_clip=0.3"])
def test_rates_and_clips_may_change(tmp_path, change):
    before = run_identity(grpo_config(tmp_path), 100)
    assert run_identity(grpo_config(tmp_path, change), 100) == before


def test_random_generators_go_on_where_they_were():
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(()).item()]

    random.gauss(0, 1)  # leaves a second number for the next call
    state = json.loads(json.dumps(RandomStates().state_dict()))
    drawn = draw()
    assert draw() != drawn
    RandomStates().load_state_dict(state)
    assert draw() == drawn
