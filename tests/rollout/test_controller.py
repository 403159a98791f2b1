"""Episodes on an engine by the documented calls, with the native engine: submit, wait, batches,
and a training loop written by hand."""

from __future__ import annotations

import pickle

import pytest
import torch
from tiny import write_tiny_model
from torch.utils.data import DataLoader

from areal import RolloutController
from areal.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.engine_api import WeightUpdateMeta
from areal.api.io_struct import FinetuneSpec
from areal.dataset.arithmetic import build_char_tokenizer
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.train.archon import ArchonEngine
from areal.rollout.tasks import TaskFailedError
from areal.utils.data import concat_padded_tensors
from areal.workflow import RLVRWorkflow

ROWS = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": "7"} for n in range(6)]
REWARD = "sample_rewards.digit_share_reward_fn"


def mean_logprob(logprobs_T, entropy_T, mb):
    return -(logprobs_T * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def num_loss_tokens(mb):
    return mb["loss_mask"].sum()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, vocab_size=len(build_char_tokenizer(folder)))


@pytest.fixture
def kwargs(model):
    gconfig = GenerationHyperparameters(max_new_tokens=4)
    return {"reward_fn": REWARD, "gconfig": gconfig, "tokenizer": str(model)}


@pytest.fixture
def rollout(model):
    config = InferenceEngineConfig(max_head_offpolicyness=1, request_timeout=60, request_retries=0)
    controller = RolloutController(NativeLocalEngine(model), config)
    controller.initialize()
    yield controller
    controller.destroy()


def test_rows_are_submitted_and_waited_for(rollout, kwargs):
    first, second = (rollout.submit(row, RLVRWorkflow, kwargs, group_size=2) for row in ROWS[:2])
    assert rollout.wait_for_task(second, timeout=900)["input_ids"].shape[0] == 2
    (trajectory,) = rollout.wait(1, timeout=900)
    assert first != second and trajectory["versions"].max() == 0


def test_a_batch_is_run_now_and_leaves_out_what_is_rejected(rollout, kwargs):
    everything = rollout.rollout_batch(ROWS, "areal.workflow.rlvr.RLVRWorkflow", kwargs)
    assert [len(trajectory["rewards"]) for trajectory in everything] == [1] * len(ROWS)
    assert rollout.rollout_batch(ROWS, RLVRWorkflow, kwargs, lambda group: False) == []


def test_a_failed_row_is_raised_after_the_others(rollout, kwargs):
    rows = [*ROWS[:1], {"no": "messages"}, *ROWS[1:3]]
    with pytest.raises(TaskFailedError, match="'messages'"):
        rollout.rollout_batch(rows, RLVRWorkflow, kwargs)
    with pytest.raises(ValueError, match="0 are submitted"):
        rollout.wait(1)


def test_a_training_loop_of_ones_own(model, rollout, kwargs):
    config = TrainEngineConfig(path=str(model), optimizer=OptimizerConfig(lr=1e-2))
    actor = ArchonEngine(config)
    actor.initialize(FinetuneSpec(1, len(ROWS), 2))
    meta = WeightUpdateMeta(type="direct")
    actor.connect_engine(rollout, meta)
    dataloader = DataLoader(ROWS, batch_size=2, collate_fn=list)
    for step in range(4):
        groups = actor.prepare_batch(
            dataloader, workflow=RLVRWorkflow, workflow_kwargs=kwargs, group_size=2
        )
        assert len(groups) == 2
        batch = concat_padded_tensors(groups)
        assert batch["versions"].max() >= step - 1
        actor.train_batch(batch, mean_logprob, num_loss_tokens)
        actor.step_lr_scheduler()
        rollout.pause()
        actor.update_weights(meta.with_version(step + 1))
        actor.set_version(step + 1)
        rollout.set_version(step + 1)
        rollout.resume()
    assert rollout.get_version() == 4
    stats = rollout.export_stats()
    assert stats["rollout/reward__count"] >= 16 and stats["server/version"] == 4
    assert "rollout/reward" not in rollout.export_stats()


def test_a_version_that_does_not_serve_is_refused(rollout):
    with pytest.raises(RuntimeError, match="serves version 0, not 3: send the weights first"):
        rollout.set_version(3)


def test_a_stream_has_one_dataloader_of_one_size(rollout, kwargs):
    first, other = (DataLoader(ROWS, batch_size=2, collate_fn=list) for _ in range(2))
    rollout.prepare_batch(first, RLVRWorkflow, kwargs)
    with pytest.raises(
        ValueError, match="dataloader: prepare_batch goes on with that of its first"
    ):
        rollout.prepare_batch(other, RLVRWorkflow, kwargs)
    with pytest.raises(ValueError, match="consumer_batch_size: set it to 3"):
        rollout.prepare_batch(DataLoader(ROWS, batch_size=3), RLVRWorkflow, kwargs)


def test_batches_that_are_not_rows_are_explained(rollout, kwargs):
    collated = DataLoader([{"i": torch.tensor(1)}] * 2, batch_size=2)
    with pytest.raises(RuntimeError, match="lists of rows, got dict; make it with collate_fn=list"):
        rollout.prepare_batch(collated, RLVRWorkflow, kwargs)


def test_a_copy_for_a_rank_is_the_engine_alone(model):
    controller = RolloutController(StandIn("here"), InferenceEngineConfig())
    copy = pickle.loads(pickle.dumps(controller))
    assert type(copy) is StandIn and copy.place == "here"


def test_what_only_a_run_has_is_refused():
    with pytest.raises(ValueError, match="rollout.workers: .*use PPOTrainer.*got 2"):
        RolloutController(StandIn("here"), InferenceEngineConfig(workers=2))


def test_an_engine_alone_says_who_runs_episodes(model):
    engine = NativeLocalEngine(model)
    for call in (engine.pause, engine.resume, lambda: engine.wait(1)):
        with pytest.raises(NotImplementedError, match=r"areal.RolloutController\(engine"):
            call()


def test_weights_of_a_folder_load_in_the_background(model, rollout, tmp_path):
    from areal.weight_sync.publication import publish

    trained = write_tiny_model(tmp_path / "other", seed=5, vocab_size=rollout_vocab(model))
    actor = ArchonEngine(TrainEngineConfig(path=str(trained)))
    actor.initialize()
    meta = WeightUpdateMeta.from_disk(tmp_path / "weights").with_version(1)
    publish(actor.hf_weights(), meta.path, meta.version)
    assert rollout.update_weights_from_disk(meta).result(timeout=900) is None
    assert rollout.get_version() == 1
    with pytest.raises(NotImplementedError, match="TrainEngine.connect_engine"):
        rollout.update_weights_from_distributed(meta, [])


def rollout_vocab(model) -> int:
    from areal.models.hf_io import read_hf_config

    return read_hf_config(model)["vocab_size"]


class StandIn(NativeLocalEngine):
    """Pickles, which an engine with a model does not."""

    def __init__(self, place: str) -> None:
        self.place = place
