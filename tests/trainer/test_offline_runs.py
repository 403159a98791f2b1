"""Whole runs of SFTTrainer, RWTrainer and DPOTrainer over one loop: files, evaluation, resuming."""

from __future__ import annotations

import json
import random
import resource

import pytest
from metrics_page import undocumented
from tiny_run import query

from areal.api.config.offline import DPOActorConfig, DPOConfig, RWConfig, SFTConfig
from areal.api.config.run import (
    ClusterSpecConfig,
    DatasetConfig,
    EvaluatorConfig,
    RecoverConfig,
    SaverConfig,
    ValidDatasetConfig,
)
from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.cli.demo import make_model
from areal.run.paths import RunPaths
from areal.run.run import Run
from areal.trainer.experiment import TRAINERS

KINDS = ("sft", "rw", "dpo")


class Stop(Exception):
    """What ends a run in the middle."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make_model(root / "tiny_model")
    return root


def config_of(kind: str, root, trial: str):
    engine = dict(
        path=str(root / "tiny_model"),
        optimizer=OptimizerConfig(lr=3e-3),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=40),
    )
    actor = {
        "sft": lambda: TrainEngineConfig(**engine),
        "rw": lambda: TrainEngineConfig(**engine, is_critic=True),
        "dpo": lambda: DPOActorConfig(**engine),
    }[kind]()
    return {"sft": SFTConfig, "rw": RWConfig, "dpo": DPOConfig}[kind](
        experiment_name=kind,
        trial_name=trial,
        cluster=ClusterSpecConfig(fileroot=str(root)),
        total_train_epochs=2,
        train_dataset=DatasetConfig(path="given", batch_size=5),
        valid_dataset=ValidDatasetConfig(path="given"),
        actor=actor,
        saver=SaverConfig(freq_steps=3),
        evaluator=EvaluatorConfig(freq_steps=2, eval_before_train=True),
        recover=RecoverConfig(mode="on", freq_steps=2),
    )


def rows_of(kind: str, count: int) -> list[dict]:
    """Learnable: an answer is chosen when it repeats the prompt's first token."""
    draw = random.Random(count)
    rows = []
    for _ in range(count):
        prompt = [draw.randrange(4, 20) for _ in range(draw.randrange(2, 5))]
        good = prompt + [prompt[0]] * draw.randrange(1, 4)
        bad = prompt + [draw.randrange(20, 30) for _ in range(draw.randrange(1, 6))]
        if kind == "sft":
            mask = [0] * len(prompt) + [1] * (len(good) - len(prompt))
            rows.append({"input_ids": good, "loss_mask": mask})
        else:
            rows.append({"chosen_ids": good, "rejected_ids": bad, "prompt_len": len(prompt)})
    return rows


def train(config, last_step: int | None = None) -> RunPaths:
    def on_step(done: int, total: int, stats: object) -> None:
        if done == last_step:
            raise Stop

    rows = rows_of(config.trainer, 22), rows_of(config.trainer, 8)
    with TRAINERS[config.trainer](config, *rows) as trainer:
        trainer.train(on_step=on_step)
    return RunPaths.of(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_evaluates_saves_and_resumes(kind, root):
    whole = train(config_of(kind, root, "whole"))
    stats = {
        step: json.loads(text) for step, text in query(whole.root, "SELECT step, stats FROM steps")
    }
    assert sorted(stats) == [-1, *range(8)]
    assert undocumented(name for of_step in stats.values() for name in of_step) == []
    assert sorted(step for step in stats if "eval/loss" in stats[step]) == [-1, 1, 3, 5, 7]
    assert all(stats[step]["tokens_per_second_predicted"] > 0 for step in range(8))
    assert stats[7]["eval/loss"] < stats[-1]["eval/loss"]
    if kind != "sft":
        assert stats[7]["eval/reward_accuracy"] >= stats[-1]["eval/reward_accuracy"]
        assert stats[7]["reward_accuracy"] > 0.6
    saved = sorted(path.name for path in (whole.checkpoints / "actor").iterdir())
    assert saved == ["epoch0epochstep2globalstep2", "epoch1epochstep1globalstep5"]

    config = config_of(kind, root, "stopped")
    with pytest.raises(Stop):
        train(config, last_step=5)
    stopped = train(config)
    assert query(stopped.root, "SELECT text FROM events WHERE kind = 'resumed'") == [("step 4",)]
    ends = [(paths.model / "model.safetensors").read_bytes() for paths in (whole, stopped)]
    assert ends[0] == ends[1]


def test_a_reward_model_goes_on_as_one(root):
    """The saved folder is a start for another reward model, and transformers scores with it."""
    from transformers import AutoModelForSequenceClassification

    paths = RunPaths.of(config_of("rw", root, "whole"))
    if not paths.model.is_dir():
        train(config_of("rw", root, "whole"))
    AutoModelForSequenceClassification.from_pretrained(paths.model)
    config = config_of("rw", root, "again")
    config.actor.path = str(paths.model)
    again = train(config, last_step=None)
    first = json.loads(query(again.root, "SELECT stats FROM steps WHERE step = -1")[0][0])
    last = json.loads(query(paths.root, "SELECT stats FROM steps WHERE step = 7")[0][0])
    assert first["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-5)


def test_a_run_may_open_as_many_files_as_the_machine_lets_it(root):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with Run(config_of("sft", root, "files"), dataset_size=5, can_evaluate=False):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("rows", [None, []])
def test_without_rows_to_evaluate_on_the_evaluator_is_off(root, rows):
    config = config_of("sft", root, "no-valid" if rows is None else "empty-valid")
    config.valid_dataset = None
    with TRAINERS["sft"](config, rows_of("sft", 22), rows) as trainer:
        trainer.train()
    stats = query(RunPaths.of(config).root, "SELECT step, stats FROM steps")
    assert [step for step, _ in stats] == list(range(8))
    assert not any("eval/" in text for _, text in stats)
