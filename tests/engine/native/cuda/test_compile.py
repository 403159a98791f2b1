"""The kernels compile for the GPU they are written for, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_prefill_and_decode_compile_for_an_h200(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(TESTS), str(TESTS.parent)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py"))],
        env={**env, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = set(done.stdout.split())
    assert {"cut_kernel", "race_kernel", "_decode_kernel", "_few_rows_kernel"} <= kernels
    assert {"_router_kernel", "_group_kernel", "_expert_kernel"} <= kernels
    assert {"_norm_router_kernel", "_gate_up_kernel", "_down_kernel"} <= kernels
