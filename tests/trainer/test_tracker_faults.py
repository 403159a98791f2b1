"""A tracker that cannot be reached, raises or hangs: the run reaches its end all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_run import query
from trainer.test_recovery import open_trainer, sft

from areal.api.config.run import WandBConfig
from areal.cli.demo import make_model
from areal.run.paths import RunPaths

# A package of the tracker's name, as it behaves when its server does not.
WANDB = """
def fail(where):
    if where == {where!r}:
        raise ConnectionRefusedError(111, "Connection refused")

class Run:
    def log(self, stats, step):
        fail("log")

    def finish(self):
        fail("close")

def init(**options):
    fail("open")
    return Run()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_model(root / "tiny_model")
    return root


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_run_ends_well_without_its_tracker(root, tmp_path, monkeypatch, caplog, where):
    (tmp_path / "wandb.py").write_text(WANDB.format(where=where))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    config = sft(root, f"tracker-{where}")
    config.stats_logger.wandb = WandBConfig(mode="online")
    try:
        with open_trainer(config) as trainer:
            trainer.train()
    finally:
        sys.modules.pop("wandb", None)
    run_dir = RunPaths.of(config).root
    assert query(run_dir, "SELECT count(*) FROM steps") == [(8,)]
    assert query(run_dir, "SELECT 1 FROM events WHERE kind = 'finished'") == [(1,)]
    warned = [text for text in caplog.messages if text.startswith("tracker wandb: ")]
    assert len(warned) == 1 and "ConnectionRefusedError" in warned[0]
    count = 8 if where == "log" else 1
    assert f"tracker wandb is incomplete: ConnectionRefusedError {count}" in caplog.messages
