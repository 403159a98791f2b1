"""Trackers are opened only when switched on; TensorBoard for real, the others where installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from areal.api.config.run import (
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)
from areal.run.trackers import close_all, open_trackers


def opened(config: StatsLoggerConfig, tmp_path):
    return open_trackers(
        config,
        experiment_name="experiment",
        trial_name="trial",
        logs=tmp_path,
        run_config={"seed": 1},
    )


def test_nothing_is_opened_or_imported_by_default(tmp_path):
    assert opened(StatsLoggerConfig(), tmp_path) == []
    code = (
        "import json, sys, areal.run.trackers\n"
        "print(json.dumps([n for n in ('torch', 'wandb', 'tensorboard') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert json.loads(done.stdout) == []


def test_tensorboard_writes_every_number_and_hides_repeated_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tb"
    config = StatsLoggerConfig(tensorboard=TensorBoardConfig(path=str(folder)))
    for first, values in ((-1, [0.0, 1.0, 2.0]), (1, [10.0])):  # the second run resumes at step 1
        (tracker,) = opened(config, tmp_path)
        for step, value in enumerate(values, start=first):
            tracker.log(step, {"rollout/reward": value})
        close_all([tracker], timeout_s=900)
        assert not tracker.failures()
    events = EventAccumulator(str(folder))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("rollout/reward")]
    assert points == [(-1, 0.0), (0, 1.0), (1, 10.0)]


@pytest.mark.parametrize(
    ("package", "config"),
    [
        ("wandb", StatsLoggerConfig(wandb=WandBConfig(mode="offline"))),
        ("swanlab", StatsLoggerConfig(swanlab=SwanlabConfig(mode="offline"))),
        ("trackio", StatsLoggerConfig(trackio=TrackioConfig(mode="local"))),
    ],
)
def test_optional_tracker_works_or_is_asked_for(tmp_path, monkeypatch, package, config):
    if importlib.util.find_spec(package) is None:
        with pytest.raises(ValueError, match=f"{package}.mode=.*pip install 'areal.trackers.'"):
            opened(config, tmp_path)
        return
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tracker,) = opened(config, tmp_path)
    tracker.log(-1, {"eval/reward": 0.1})
    tracker.log(0, {"rollout/reward": 0.5})
    close_all([tracker], timeout_s=900)
    assert not tracker.failures()
