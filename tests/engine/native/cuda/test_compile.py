"""The kernels compile for the GPU they are written for, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[3]
SHARED_BYTES = 227 * 1024  # that a program may take on an H200


def compile_for_hopper(cache: Path, *what: str) -> list[list[str]]:
    """[model, kernel, shared bytes] of each specialization."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(TESTS), str(TESTS.parent)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py")), *what],
        env={**env, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(int(shared_bytes) <= SHARED_BYTES for _, _, shared_bytes in lines)
    return lines


@pytest.mark.slow
def test_kernels_compile_for_an_h200(tmp_path):
    """In one process and with one cache: models have kernels in common."""
    models = ["qwen3", "experts", "gemma3", "heads_of_80", "heads_of_96"]
    kernels = defaultdict(list)
    latent = ["latent", "latent_of_32_heads", "latent_of_40"]
    others = ["adapters", "fp8", "fp8_of_16", "hybrid", "fp8_training"]
    for model, kernel, _ in compile_for_hopper(tmp_path, *models, *latent, *others):
        kernels[model].append(kernel)
    training = {"solve_kernel", "states_back_kernel", "chunk_back_kernel", "mix_back_kernel"}
    decoding = {"_recur_kernel", "_convolve_kernel", "_gated_rope_kernel", "_add_shared_kernel"}
    assert training | decoding <= set(kernels["hybrid"])
    attention = {"_decode_kernel", "_prefill_kernel", "_prompt_kernel"}
    dense = attention | {"cut_kernel", "race_kernel", "_few_rows_kernel"}
    few, many = {"_norm_router_kernel", "_gate_up_kernel", "_down_kernel"}, {"_router_kernel"}
    experts = few | many | {"_group_kernel", "_expert_kernel"}
    for model in models:
        # Layers with a window do not read prompts together, and heads_of_96 has no other.
        wanted = dense - {"_prompt_kernel"} if model == "heads_of_96" else dense
        assert wanted <= set(kernels[model]), model
        assert experts & set(kernels[model]) == (experts if model == "experts" else set()), model
    assert set(kernels["fp8"]) == set(kernels["fp8_of_16"]) == attention
    by_latents = {"_place_kernel", "_decode_latents_kernel", "_prefill_latents_kernel"}
    for model in latent:
        assert by_latents | many | {"_group_kernel"} == set(kernels[model]), model
    assert set(kernels["adapters"]) == {
        "_shrink_kernel",
        "_expand_kernel",
        "_expand_gate_kernel",
    }
    assert kernels["fp8_training"].count("_weight_kernel") == 2  # as it is and transposed
    named = {"_quantize_kernel", "_gate_kernel", "_gate_grad_kernel", "_transpose_kernel"}
    assert named <= set(kernels["fp8_training"])
