"""Marks: every call of a contract that can travel says how."""

from __future__ import annotations

from areal.api.engine_api import Mark, TrainEngine, marks_of, split
from areal.infra.train_controller import TrainController


def test_every_method_of_a_training_engine_travels_but_those_of_a_rank_alone():
    methods = {name for name in vars(TrainEngine) if not name.startswith("_")}
    of_one_rank = {"hf_weights", "data_parallel_rank", "is_data_parallel_head"}
    of_the_controller = {"connected_engine", "export_stats", "forward", "prepare_batch"}
    of_the_controller |= {"rollout_batch", "train", "eval"}
    assert methods - set(marks_of(TrainEngine)) == of_one_rank | of_the_controller
    assert of_the_controller <= set(vars(TrainController))


def test_marks_are_inherited_and_leave_the_method_as_it_is():
    class Contract:
        @split(merges_rows=True)
        def double(self, batch):
            return batch * 2

    class Engine(Contract):
        pass

    assert marks_of(Engine) == {"double": Mark("split", merges_rows=True)}
    assert Engine().double(2) == 4
