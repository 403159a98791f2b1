"""Runs over several GPUs, with NCCL: `make test-multi-gpu` on a machine that has them.

Each layout trains the same steps as one GPU does, and the losses agree up to bfloat16; a GRPO run
sends its weights from device to device, and its servers generate with what the trainer has.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_run import PATIENCE_S, areal, overrides, query

from areal.cli.demo import make_model

pytestmark = pytest.mark.multi_gpu

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_GPUS = torch.cuda.device_count()
TRAIN = ("total_train_steps=4", "evaluator.freq_steps=null")
LAYOUTS = [
    ("archon:d2", 2),
    ("archon:t2", 2),
    ("archon:p2", 2),
    ("archon:c2", 2),
    ("fsdp:d2", 2),
    ("fsdp:t2", 2),
    ("archon:d2t2", 4),
    ("archon:d2p2t2", 8),
]


def needs(count: int) -> None:
    if count > NUM_GPUS:
        pytest.skip(f"needs {count} CUDA devices, this machine has {NUM_GPUS}")


def train(recipe: str, *options: str) -> None:
    tests = str(Path(__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    run = areal("train", EXAMPLES / recipe, *options, env=env)
    _, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, err


def stats_of(folder: Path) -> list[dict]:
    rows = query(folder, "SELECT stats FROM steps WHERE step >= 0 ORDER BY step")
    return [json.loads(row) for (row,) in rows]


@pytest.fixture(scope="module")
def sft_losses(tmp_path_factory):
    """Losses of a few steps with the same model, rows and seed, by layout."""
    root, known = tmp_path_factory.mktemp("sft"), {}

    def losses(backend: str) -> list[float]:
        if backend not in known:
            if not (root / "model").is_dir():
                make_model(root / "model")
            name = backend.replace(":", "_")
            where = (f"cluster.fileroot={root}", f"trial_name={name}", f"actor.path={root}/model")
            train("sft/arithmetic_sft.yaml", *where, *TRAIN, f"actor.backend={backend}")
            (folder,) = root.glob(f"*/{name}")
            known[backend] = [stats["loss"] for stats in stats_of(folder)]
        return known[backend]

    return losses


@pytest.mark.parametrize(("backend", "count"), LAYOUTS, ids=[name for name, _ in LAYOUTS])
def test_a_layout_trains_as_one_gpu_does(sft_losses, backend, count):
    needs(count)
    assert sft_losses(backend) == pytest.approx(sft_losses("archon:d1"), rel=0.02)


@pytest.mark.parametrize("backend", ["archon:d1", "archon:d2", "fsdp:d2"])
def test_weights_go_from_device_to_device(tmp_path, backend):
    needs(2 + int(backend[-1]) - 1)
    more = (f"actor.backend={backend}", "rollout.backend=native:d1", "trial_name=xccl")
    mode = "actor.weight_update_mode=xccl"
    train("math/arithmetic_grpo.yaml", *overrides(tmp_path, *more, mode, "total_train_steps=3"))
    folder = tmp_path / "arithmetic" / "xccl"
    assert stats_of(folder)[-1]["server/version"] == 3
    looks = query(folder, "SELECT version, stage, state FROM looks ORDER BY id")
    assert looks == [(v, stage, "ok") for v in (1, 2) for stage in ("weights", "logits")]
