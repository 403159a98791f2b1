"""The public names load when they are first used, and no heavy package before that."""

from __future__ import annotations

import subprocess
import sys

import pytest

import areal
import areal.api

HEAVY = ("torch", "transformers", "datasets", "numpy", "fastapi", "aiohttp", "matplotlib")


@pytest.mark.parametrize(
    "module", ["areal", "areal.api", "areal.api.cli_args", "areal.api.alloc_mode", "areal.cli.main"]
)
def test_import_loads_nothing_heavy(module: str) -> None:
    # OmegaConf is light, but 0.1 s: it comes with the first file that is read.
    program = f"""
import sys, {module}
print([name for name in {(*HEAVY, "omegaconf", "yaml")} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", areal.api.__all__)
def test_contract_names_exist(name: str) -> None:
    assert getattr(areal.api, name) is not None


def test_workflow_context_is_the_one_the_executor_sets() -> None:
    from areal.api.workflow_context import workflow_context

    assert areal.workflow_context is workflow_context


def test_public_names_are_listed_and_others_are_refused() -> None:
    trainers = {"PPOTrainer", "SFTTrainer", "RWTrainer", "DPOTrainer"}
    assert trainers | {"workflow_context", "__version__"} <= set(dir(areal))
    assert "RolloutWorkflow" in dir(areal.api)
    for module in (areal, areal.api):
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            _ = module.Nothing
