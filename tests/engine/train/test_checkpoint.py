"""Checkpoints of both engines: of one moment though training goes on, and never a wrong byte."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fsdp_world import loss_fn, loss_tokens, make_batch, open_engine, weights_of
from tiny import write_tiny_model

from areal.api.config.train_engine import OptimizerConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.train import checkpoint
from areal.run.recover import BackgroundWriter
from areal.utils.manifest import DamagedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def engine(folder):
    return open_engine(folder, "archon:d1")


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "point"
    engine.save(point(path))
    return path


def point(path: Path) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(path), weight_format="dcp", with_optim=True)


def go_on(engine, steps: range) -> None:
    for number in steps:
        engine.train_batch(make_batch(number), loss_fn, loss_tokens)
        engine.step_lr_scheduler()


@pytest.mark.parametrize("options", [{"backend": "archon:d1"}, {"backend": "fsdp:d1"}])
def test_a_snapshot_is_of_its_moment_while_steps_finish_beside_its_write(folder, tmp_path, options):
    engine = open_engine(folder, **options)
    go_on(engine, range(2))
    engine.set_version(2)
    writer, path = BackgroundWriter("test"), tmp_path / "point"
    is_writing, may_write = threading.Event(), threading.Event()
    write = engine.capture()

    def write_late() -> None:
        is_writing.set()
        assert may_write.wait(300)
        write(path)

    writer.start(write_late)
    assert is_writing.wait(300)
    go_on(engine, range(2, 4))
    assert not writer.poll() and not path.exists()  # two steps are done, the write is not
    may_write.set()
    assert writer.wait() and not writer.wait()
    writer.close()

    resumed = open_engine(folder, **options)
    resumed.load(point(path))
    assert resumed.get_version() == 2
    go_on(resumed, range(2, 4))
    straight = weights_of(engine)
    assert all(torch.equal(straight[name], w) for name, w in resumed.hf_weights())


def test_capture_and_save_write_the_same_files(engine, whole, tmp_path):
    engine.capture()(tmp_path / "captured")
    files = sorted(path.name for path in whole.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "captured").iterdir())
    for name in files:
        assert (whole / name).read_bytes() == (tmp_path / "captured" / name).read_bytes(), name


def test_digests_are_of_the_bits_of_each_tensor(folder, whole, tmp_path, monkeypatch):
    other = open_engine(folder, "archon:d1")
    other.save(point(tmp_path / "same"))
    expected = checkpoint.digests(whole)
    monkeypatch.setattr(checkpoint, "_DIGEST_BYTES", 5_000)  # several parts
    assert checkpoint.digests(tmp_path / "same") == expected
    name, weight = next(iter(other.optimizer.masters().items()))
    weight.view(-1)[0] = -weight.view(-1)[0]
    other.save(point(tmp_path / "other"))
    found = checkpoint.digests(tmp_path / "other")
    assert list(found) == sorted(expected)
    assert [key for key in found if found[key] != expected[key]] == [f"weights.{name}"]
    shard = tmp_path / "other" / "rank0.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="rank0.bin"):
        checkpoint.digests(tmp_path / "other")


def test_every_damage_is_refused_by_the_name_of_the_file(engine, whole, tmp_path):
    before = weights_of(engine)
    draw = random.Random(5)
    names = sorted(path.name for path in whole.iterdir())
    assert names == ["index.json", "manifest.json", "rank0.bin"]
    for number in range(40):
        path = tmp_path / str(number)
        shutil.copytree(whole, path)
        file = path / draw.choice(names)
        data = bytearray(file.read_bytes())
        match draw.choice(["flip", "cut", "grow", "remove"]):
            case "flip":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                file.write_bytes(data)
            case "cut":
                file.write_bytes(data[: draw.randrange(len(data))])
            case "grow":
                file.write_bytes(data + b"x")
            case "remove":
                file.unlink()
        with pytest.raises(DamagedError, match=f"is damaged: {file.name}: "):
            engine.load(point(path))
    assert all(torch.equal(before[name], weight) for name, weight in engine.hf_weights())


def test_files_of_another_checkpoint_and_strangers_are_refused(engine, folder, whole, tmp_path):
    other = open_engine(folder, "archon:d1")
    go_on(other, range(1))
    other.save(point(tmp_path / "other"))
    mixed = shutil.copytree(whole, tmp_path / "mixed")
    shutil.copy(tmp_path / "other" / "rank0.bin", mixed)
    with pytest.raises(DamagedError, match="rank0.bin: its checksum differs"):
        engine.load(point(mixed))
    extra = shutil.copytree(whole, tmp_path / "extra")
    shutil.copy(whole / "rank0.bin", extra / "rank1.bin")
    with pytest.raises(DamagedError, match="rank1.bin: foreign"):
        engine.load(point(extra))
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*nowhere"):
        engine.load(point(tmp_path / "nowhere"))


def test_a_checkpoint_of_another_model_is_refused_by_the_tensor(folder, whole, tmp_path):
    deeper = write_tiny_model(tmp_path / "deeper", "qwen3", num_hidden_layers=3)
    open_engine(deeper, "archon:d1").save(point(tmp_path / "point"))
    smaller = open_engine(folder, "archon:d1")
    with pytest.raises(ValueError, match=r"layers\.2\..*: \[.*\] there, absent here"):
        smaller.load(point(tmp_path / "point"))
    sgd = open_engine(folder, "archon:d1", optimizer=OptimizerConfig(type="sgd", lr=0.1))
    with pytest.raises(ValueError, match="not a checkpoint of this model and optimizer.*moments"):
        sgd.load(point(whole))
    sgd.load(SaveLoadMeta(path=str(whole), weight_format="dcp"))  # weights alone fit


_WRITE_UNTIL_KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from areal.run.recover import RecoverPoint, RecoverStore
from areal.run.database import LedgerView
from fsdp_world import open_engine
from engine.train.test_checkpoint import go_on, point

engine = open_engine(sys.argv[1], "archon:d1")
reader = open_engine(sys.argv[1], "archon:d1")
root, draw = Path(sys.argv[2]), random.Random(11)
marks = {step: "mark" for step in range(10_000)}
ledger = LedgerView(root / "run.db", num_steps=10_000, marks=marks, whole=None, is_finished=False)
store = RecoverStore(root, lambda: ledger, identity={}, keep=2)
for trial in range(6):
    seen, told = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(trial * 1000, trial * 1000 + 1000):
            engine.set_version(step)
            write = engine.capture()
            store.save(step, "mark", lambda folder: write(folder / "actor"), {"step": step})
            os.write(told, step.to_bytes(8, "big"))
        os._exit(1)
    first = os.read(seen, 8)
    time.sleep(draw.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(told)
    rest = b""
    while part := os.read(seen, 1 << 16):
        rest += part
    said = int.from_bytes((first + rest)[-8:], "big")

    def read(found):
        state = found.load()
        reader.load(point(found.path / "actor"))
        return found.global_step, state["step"], reader.get_version()

    step, in_state, version = store.read_newest(read)
    assert step == in_state == version and said <= step <= said + 1, (step, in_state, version, said)
    assert not [p for p in root.iterdir() if not p.name.startswith("step_")]
    print(step, flush=True)
"""


def test_kill_at_any_moment_of_a_write_leaves_the_last_point_whole(folder, tmp_path):
    tests = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _WRITE_UNTIL_KILLED, str(folder), str(tmp_path / "recover")],
        cwd=tests,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 6
