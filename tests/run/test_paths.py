"""The layout of a run's folder, and that asking for paths writes nothing."""

from __future__ import annotations

from types import SimpleNamespace

from areal.run.paths import RunPaths


def test_layout_follows_the_names_of_the_root_config(tmp_path):
    config = SimpleNamespace(
        cluster=SimpleNamespace(fileroot=str(tmp_path)), experiment_name="gsm8k", trial_name="t1"
    )
    paths = RunPaths.of(config)
    root = tmp_path / "gsm8k" / "t1"
    assert paths.root == root
    assert paths.config == root / "config.yaml"
    assert paths.database == root / "run.db"
    assert paths.trace("server0") == root / "traces" / "server0.jsonl"
    folders = (
        paths.recover,
        paths.checkpoints,
        paths.model,
        paths.weights,
        paths.logs,
        paths.traces,
    )
    assert {p.parent for p in folders} == {root} and len(set(folders)) == 6
    assert not root.exists()
