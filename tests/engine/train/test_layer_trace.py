"""Layer traces: of Archon on several ranks, and of models of transformers."""

from __future__ import annotations

import pytest
from engine.train.archon_world import open_engine
from fsdp_world import FT_SPEC
from fsdp_world import open_engine as open_fsdp
from gloo_ranks import run_ranks
from tiny import write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.train.fsdp.engine import FSDPEngine

TOKENS = [5, 7, 9, 11, 3, 8, 2]
LAYOUTS = ["archon:d2", "archon:t2", "archon:c2"]


def test_ranks_trace_the_layers_of_the_whole_model(tmp_path):
    folder = str(write_tiny_model(tmp_path / "experts", "qwen3_moe"))
    dense = str(write_tiny_model(tmp_path / "dense", "qwen3"))
    whole = open_engine(folder, "archon:d1").layer_trace(TOKENS)
    of_dense = open_fsdp(dense).layer_trace(TOKENS)["layers"]
    del whole["layers"]["logits"]
    for traces in run_ranks(2, "engine.train.test_layer_trace:traces_of", folder, dense):
        for layer, numbers in traces.pop("fsdp:d2")["layers"].items():
            assert numbers == pytest.approx(of_dense[layer], abs=1e-4), layer
        for layout, trace in traces.items():
            assert trace["experts"] == whole["experts"], layout
            assert (
                trace["args"] == whole["args"] and trace["layers"].keys() == whole["layers"].keys()
            )
            for layer, numbers in whole["layers"].items():
                assert trace["layers"][layer] == pytest.approx(numbers, abs=1e-4), (layout, layer)


def test_models_of_transformers_show_the_same_layers(tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3")
    ours = open_engine(str(folder), "archon:d1").layer_trace(TOKENS)["layers"]
    theirs = open_fsdp(folder).layer_trace(TOKENS)
    assert list(theirs["layers"]) == [layer for layer in ours if layer != "logits"]
    for layer, numbers in theirs["layers"].items():
        assert numbers == pytest.approx(ours[layer], abs=1e-4), layer


def traces_of(folder: str, dense: str) -> dict:
    traces = {layout: open_engine(folder, layout).layer_trace(TOKENS) for layout in LAYOUTS}
    engine = FSDPEngine(TrainEngineConfig(path=dense, backend="fsdp:d2"))
    engine.create_process_group(ModelAllocation.from_str("fsdp:d2").parallel)
    engine.initialize(FT_SPEC)
    return traces | {"fsdp:d2": engine.layer_trace(TOKENS)}
