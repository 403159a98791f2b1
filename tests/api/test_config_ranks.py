"""`rollout.backend: native:d1tN`: which layouts a config may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import complaint, load


@pytest.mark.parametrize(("backend", "num_ranks"), [("native:d1", 1), ("native:t4", 4)])
def test_the_model_can_be_cut(tmp_path: Path, backend: str, num_ranks: int) -> None:
    config = load(tmp_path, "ppo", f"rollout.backend={backend}")
    assert config.rollout.tensor_parallel == num_ranks


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.backend=native:d2t2"], "rollout.backend 'native:d2t2' cannot run in this"),
        (["rollout.backend=native:d1t2p2"], "rollout.backend 'native:d1t2p2' cannot run in this"),
        (["rollout.backend=vllm:d1t2"], "rollout.backend 'vllm:d1t2' cannot run in this version"),
        (["actor.backend=archon:d1t2"], "actor.backend 'archon:d1t2' cannot run in this version"),
        (
            ["rollout.backend=native:d1t2", "actor.weight_update_mode=direct"],
            "actor.weight_update_mode must be shm or disk when rollout.backend is 'native:d1t2'",
        ),
        (
            ["rollout.backend=native:d1t2", "native.batch_invariant=true"],
            "native.batch_invariant must be false when rollout.backend is 'native:d1t2'",
        ),
    ],
)
def test_layouts_that_cannot_run(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, "ppo", *overrides)
