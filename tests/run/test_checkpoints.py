"""Names, rhythm per role, and that a failed save leaves nothing that looks like a checkpoint."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from areal.api.io_struct import SaveLoadMeta, StepInfo
from areal.run.checkpoints import FrequencyTimer, Saver, checkpoint_name

STEP = StepInfo(epoch=2, epoch_step=1, global_step=7, steps_per_epoch=3)


class WritingEngine:
    """Saves one file with its label, or fails halfway when told to."""

    def __init__(self, label: str = "weights", fails: OSError | None = None) -> None:
        self.label = label
        self.fails = fails

    def save(self, meta: SaveLoadMeta) -> None:
        assert meta.weight_format == "hf"
        (Path(meta.path) / "model.safetensors").write_text(self.label)
        if self.fails:
            raise self.fails


def test_checkpoint_gets_the_documented_name(tmp_path):
    assert checkpoint_name(STEP) == "epoch2epochstep1globalstep7"
    saver = Saver(tmp_path, "actor", FrequencyTimer(freq_steps=1))
    path = saver.save_if_due(WritingEngine(), STEP)
    assert path == tmp_path / "actor" / "epoch2epochstep1globalstep7"
    assert (path / "model.safetensors").read_text() == "weights"


def test_each_role_is_saved_in_its_own_rhythm(tmp_path):
    savers = [Saver(tmp_path, role, FrequencyTimer(freq_steps=2)) for role in ("actor", "critic")]
    step = STEP
    for _ in range(4):
        for saver in savers:
            saver.save_if_due(WritingEngine(), step)
        step = step.next()
    saved = {p.parent.name: p.name for p in tmp_path.glob("*/*") if "globalstep8" in p.name}
    assert saved.keys() == {"actor", "critic"}
    assert len(list(tmp_path.glob("*/*"))) == 4


def test_only_the_newest_are_kept_by_number_and_leftovers_go(tmp_path):
    (tmp_path / "actor" / ".old.tmp-999999999-0123abcd").mkdir(parents=True)
    saver = Saver(tmp_path, "actor", FrequencyTimer(freq_steps=1), keep=2)
    (tmp_path / "actor" / "notes").mkdir()
    step = StepInfo(epoch=0, epoch_step=0, global_step=8, steps_per_epoch=3)
    for _ in range(4):
        saver.save_if_due(WritingEngine(), step)
        step = step.next()
    kept = [p.name.rpartition("step")[2] for p in (tmp_path / "actor").iterdir()]
    assert sorted(kept) == ["10", "11", "notes"]


def test_step_done_again_after_recovery_replaces_its_checkpoint(tmp_path):
    saver = Saver(tmp_path, "actor", FrequencyTimer(freq_steps=1))
    saver.save_if_due(WritingEngine("old"), STEP)
    path = saver.save_if_due(WritingEngine("new"), STEP)
    assert (path / "model.safetensors").read_text() == "new"


def test_full_disk_leaves_nothing_half_written(tmp_path):
    saver = Saver(tmp_path, "actor", FrequencyTimer(freq_steps=1))
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        saver.save_if_due(WritingEngine(fails=full), STEP)
    assert list((tmp_path / "actor").iterdir()) == []
