"""Weights offered by each transport, and roots that never pile up in memory or on disk."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from areal.api.io_struct import WeightUpdateMeta
from areal.weight_sync.publication import open_publication
from areal.weight_sync.transports import PublicationRoot, offer_weights, remove_old_versions

NOBODY = 65534
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def load(meta, tensors) -> dict[str, torch.Tensor]:
    """What any engine does with an offer."""
    source = open_publication(meta.path, key=meta.key) if tensors is None else tensors
    return {name: tensor.clone() for name, tensor in source}


@pytest.mark.parametrize("kind", ["direct", "shm", "disk"])
def test_each_transport_delivers(tmp_path, kind):
    with PublicationRoot(kind, run_name="a/b c", disk_root=tmp_path / "weights") as root:
        meta = root.meta(recompute_kv=False)
        for version in (1, 2, 3):
            now = meta.with_version(version)
            with offer_weights(now, iter(WEIGHTS.items())) as tensors:
                loaded = load(now, tensors)
            assert loaded.keys() == WEIGHTS.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in WEIGHTS.items())
        if kind != "direct":
            kept = {entry.name for entry in root.path.iterdir() if not entry.name.startswith(".")}
            assert kept == {"weight_update_v2", "weight_update_v3"}
    root.close()
    assert root.path is None or not root.path.exists()


def test_a_refused_publication_is_kept_for_inspection(tmp_path):
    meta = WeightUpdateMeta.from_disk(tmp_path).with_version(1)
    with pytest.raises(RuntimeError, match="no"), offer_weights(meta, WEIGHTS.items()):
        raise RuntimeError("no")
    assert open_publication(meta.path).version == 1


def test_remove_old_versions_by_number_not_by_name(tmp_path):
    for version in (8, 9, 10, 11):
        (tmp_path / f"weight_update_v{version}").mkdir()
    (tmp_path / "other").mkdir()
    remove_old_versions(tmp_path, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["other", "weight_update_v10", "weight_update_v11"]
    remove_old_versions(tmp_path, keep=0)
    assert os.listdir(tmp_path) == ["other"]


def test_a_root_has_one_live_owner(tmp_path):
    with (
        PublicationRoot("disk", run_name="r", disk_root=tmp_path),
        pytest.raises(RuntimeError, match="still alive"),
    ):
        PublicationRoot("disk", run_name="r", disk_root=tmp_path)


def test_memory_of_a_killed_owner_is_given_back(tmp_path):
    script = (
        "import os, sys\n"
        "from areal.weight_sync.transports import PublicationRoot\n"
        "root = PublicationRoot('shm', run_name='killed', disk_root=sys.argv[1])\n"
        "(root.path / 'weight_update_v1').mkdir()\n"
        "print(root.path, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    orphan = done.stdout.strip()
    assert done.returncode == -9 and os.path.isdir(orphan)
    with PublicationRoot("shm", run_name="next", disk_root=tmp_path) as root:
        assert not os.path.exists(orphan)
        assert root.path.exists()


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_nobody_else_may_enter(tmp_path, kind):
    with PublicationRoot(kind, run_name="r", disk_root=tmp_path / "weights") as root:
        with offer_weights(root.meta().with_version(1), WEIGHTS.items()):
            pass
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in root.path.rglob("*")}
        assert stat.S_IMODE(root.path.stat().st_mode) == 0o700
        assert set(modes.values()) == {0o700, 0o600}
        assert "/weight_update_v1/" in str(list(modes))


def test_names_in_memory_cannot_be_known_before(tmp_path):
    """Whoever knows the name makes the folder first, and owns what is put there."""
    roots = [PublicationRoot("shm", run_name="r", disk_root=tmp_path) for _ in range(2)]
    assert roots[0].path != roots[1].path
    assert all(len(root.path.name) >= len("areal-weights-r-") + 8 for root in roots)
    assert roots[0].meta().key != roots[1].meta().key
    assert roots[0].meta().key not in repr(roots[0].meta())
    for root in roots:
        root.close()


def test_a_loose_folder_of_ours_is_made_tight(tmp_path):
    (tmp_path / "weights").mkdir(mode=0o755)
    with PublicationRoot("disk", run_name="r", disk_root=tmp_path / "weights") as root:
        assert stat.S_IMODE(root.path.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_folder_of_another_user_is_refused(tmp_path):
    theirs = tmp_path / "weights"
    theirs.mkdir()
    os.chmod(theirs, 0o777)
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(RuntimeError, match=f"weights belongs to user {NOBODY}, not to 0"):
        PublicationRoot("disk", run_name="r", disk_root=theirs)
    assert os.listdir(theirs) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_can_neither_read_nor_swap_nor_trick_the_sweep(tmp_path):
    attack = textwrap.dedent("""
        import os, sys
        def tried(what):
            try:
                what()
                return True
            except OSError:
                return False
        path = sys.argv[1]
        print(tried(lambda: os.listdir(path)), tried(lambda: os.rename(path, path + "-old")),
              tried(lambda: open(path + "/weight_update_v1/manifest.json").read()))
        # A folder that looks abandoned, with a link that leads to what is not theirs.
        os.mkdir("/dev/shm/areal-weights-trap", 0o700)
        os.symlink(sys.argv[2], "/dev/shm/areal-weights-trap/.owner.lock")
        os.symlink(path, "/dev/shm/areal-weights-link")
    """)
    trap, link = Path("/dev/shm/areal-weights-trap"), Path("/dev/shm/areal-weights-link")
    (tmp_path / "kept").write_text("as it was")
    try:
        with PublicationRoot("shm", run_name="r", disk_root=tmp_path) as root:
            with offer_weights(root.meta().with_version(1), WEIGHTS.items()):
                pass
            done = subprocess.run(
                ["/usr/bin/python3", "-c", attack, str(root.path), str(tmp_path / "kept")],
                capture_output=True,
                text=True,
                user=NOBODY,
                group=NOBODY,
                cwd="/",
            )
            assert done.stdout.split() == ["False"] * 3, done.stderr
            with PublicationRoot("shm", run_name="next", disk_root=tmp_path):
                assert trap.is_dir() and link.is_symlink()  # not ours to remove
            assert (root.path / "weight_update_v1").is_dir()
        assert (tmp_path / "kept").read_text() == "as it was"
    finally:
        link.unlink(missing_ok=True)
        shutil.rmtree(trap, ignore_errors=True)


def test_unknown_transport(tmp_path):
    with pytest.raises(ValueError, match="unknown weight transport 'carrier'"):
        PublicationRoot("carrier", run_name="r", disk_root=tmp_path)
