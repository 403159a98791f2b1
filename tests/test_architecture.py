"""Rules of the code base that a test keeps, so that no review has to.

Layers of imports, no cycles, the length of a file, a docstring at its top, no torch behind the
light doors, and no `print` outside the command line. Each failure lists file, line and what to do.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_trees import nodes_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "areal"
MAX_LINES = 600

# A package may import packages of lower layers, also lazily in a function and for types alone.
# Packages of one layer do not import each other; `utils` is the one that may use `api`.
LAYERS = (
    {"api"},
    {"utils"},
    {"algorithm", "dataset", "models", "openai", "reward", "sandbox", "weight_sync"},
    {"agents", "engine", "environments", "infra", "planner"},
    {"run"},
    {"workflow"},
    {"rollout"},
    {"trainer"},
    {"doctor", "evaluation"},
    {"dashboard"},
    {"cli", "tools"},
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
# Public doors that stand lower than what is behind them.
DOORS = {
    ("areal.api.reward_api", "areal.sandbox.pool"),
    ("areal.engine.sglang_remote", "areal.rollout.remote_engines"),
    ("areal.engine.vllm_remote", "areal.rollout.remote_engines"),
}
LIGHT_MODULES = ("areal", "areal.api", "areal.cli.main")
HEAVY_PACKAGES = {"torch", "transformers", "datasets", "safetensors", "fastapi", "matplotlib"}


def source_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"


def test_every_layer_is_there_and_every_package_has_one():
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert packages == set(LAYER_OF)


def test_imports_go_down_the_layers():
    faults = []
    for file in source_files("areal"):
        if file.parent == PACKAGE:
            continue  # the public door loads names of any layer, lazily
        for node, target in areal_imports(file):
            fault = import_fault(module_name(file), target)
            if fault:
                faults.append(f"{place(file, node)}: {fault}")
    assert not faults, "\n".join(faults)


def module_name(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def import_fault(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, a module or a name in one; None when it may."""
    if target == "areal.__version__":
        return None
    package, other = module.split(".")[1], target.split(".")[1]
    if package not in LAYER_OF:
        return f"areal.{package} has no layer: add it to LAYERS"
    if other not in LAYER_OF:
        return f"imports {target}: inside the package import from the module that defines the name"
    if other == package or any(
        module == door and f"{target}.".startswith(f"{behind}.") for door, behind in DOORS
    ):
        return None
    if LAYER_OF[other] < LAYER_OF[package]:
        return None
    return f"areal.{package} (layer {LAYER_OF[package]}) imports {target} (layer {LAYER_OF[other]})"


def areal_imports(file: Path) -> Iterator[tuple[ast.AST, str]]:
    """(node, imported module or name in it) for every import of areal, also one for types."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from areal.utils import logging`: the name may itself be a module.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node, name) for name in names if name.startswith("areal."))


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("areal.engine.train.archon", "areal.models.hf_io", True),
        ("areal.engine.train.archon", "areal.rollout.executor", False),
        ("areal.rollout.executor", "areal.workflow.resolve", True),
        ("areal.workflow.rlvr", "areal.rollout.ledger", False),
        ("areal.utils.logging", "areal.api.io_struct", True),
        ("areal.api.io_struct", "areal.utils.logging", False),
        ("areal.api.reward_api", "areal.sandbox.pool.RewardError", True),
        ("areal.api.io_struct", "areal.sandbox.pool", False),
        ("areal.reward.gsm8k", "areal.dataset.gsm8k", False),
        ("areal.trainer.base", "areal.engine.train.archon", True),
        ("areal.utils.fs", "areal.trainer", False),
        ("areal.trainer.base", "areal.PPOTrainer", False),
        ("areal.newcomer.file", "areal.utils", False),
    ],
)
def test_the_layer_rule_itself(module, target, allowed):
    assert (import_fault(module, target) is None) == allowed


def test_no_module_imports_itself_by_a_detour():
    """Also not lazily or for types: a cycle is one module in several files."""
    modules = {module_name(file): file for file in source_files("areal")}
    imports = {
        module: {
            found if found in modules else found.rpartition(".")[0]
            for _, found in areal_imports(file)
        }
        & set(modules) - {module, "areal"}
        for module, file in modules.items()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_relative_imports_are_not_used():
    faults = [
        place(file, node)
        for file in source_files("areal", "tests")
        if re.search(r"\bfrom[\s\\]*\.", file.read_text(encoding="utf-8"))  # else there is none
        for node in nodes_of(file)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not faults, f"write the whole module name: {faults}"


def test_files_fit_in_the_head():
    long = {
        str(file.relative_to(ROOT)): lines
        for file in source_files("areal", "tests", "examples", "benchmark")
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines, split by idea: {long}"


def test_every_file_opens_with_what_it_is():
    silent = [
        str(file.relative_to(ROOT))
        for file in source_files("areal", "tests", "examples", "benchmark")
        if not ast.get_docstring(first_statement(file))
    ]
    assert not silent, f"add a docstring at the top: {silent}"


def first_statement(file: Path) -> ast.Module:
    """The file as far as the end of its first statement: the rest is not parsed for this."""
    with tokenize.open(file) as source:
        ends = (
            t.end[0]
            for t in tokenize.generate_tokens(source.readline)
            if t.type == tokenize.NEWLINE
        )
        end = next(ends, 0)
        source.seek(0)
        return ast.parse("".join(line for _, line in zip(range(end), source, strict=False)))


def test_print_only_in_the_command_line():
    faults = [
        place(file, node)
        for file in source_files("areal")
        if not {PACKAGE / "cli", PACKAGE / "tools"} & set(file.parents)
        for node in nodes_of(file)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not faults, f"use a logger: {faults}"


def test_every_folder_of_code_is_a_package():
    # A folder without __init__.py imports, but tools that list packages pass it by.
    missing = sorted(
        {
            str(file.parent.relative_to(ROOT))
            for file in source_files("areal")
            if not (file.parent / "__init__.py").exists()
        }
    )
    assert not missing, f"add an __init__.py with a docstring: {missing}"


def test_tests_mirror_the_package():
    folders = {file.parent.relative_to(ROOT / "tests").parts for file in source_files("tests")}
    strangers = [
        "/".join(parts)
        for parts in folders
        if parts and parts[0] != "data" and not (PACKAGE / Path(*parts)).is_dir()
    ]
    assert not strangers, f"no areal package of that name: {strangers}"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_doors_load_nothing_heavy(module):
    code = (
        "import importlib, json, pkgutil, sys\n"
        f"door = importlib.import_module({module!r})\n"
        "if door.__name__ == 'areal.api':\n"
        "    for found in pkgutil.walk_packages(door.__path__, 'areal.api.'):\n"
        "        importlib.import_module(found.name)\n"
        f"print(json.dumps(sorted(set(sys.modules) & {HEAVY_PACKAGES!r})))\n"
    )
    assert json.loads(run_python(code)) == []


def test_trainers_and_servers_start_without_what_few_of_them_use():
    """Each of these takes a quarter of a second of a core or more, in every process of a run."""
    code = (
        "import json, sys\n"
        "import areal.trainer.experiment\n"
        "found = {'fastapi', 'ray', 'sympy', 'torch.distributed.tensor'} & set(sys.modules)\n"
        "import areal.cli.serve, areal.engine.native.server\n"
        "found |= {'ray', 'sympy', 'torch.distributed.tensor', 'transformers'} & set(sys.modules)\n"
        "print(json.dumps(sorted(found)))\n"
    )
    assert json.loads(run_python(code)) == []


# Packages of extras and of other environments, and who may import them at its top.
NEEDS = {
    "flashinfer": (),
    "httpx": (),
    "llguidance": (),
    "megatron": ("areal.engine.train.megatron",),
    "openai": (),
    "peft": ("areal.engine.train.fsdp.lora",),
    "ray": (
        "areal.infra.cluster_check",
        "areal.infra.launcher.cluster",
        "areal.infra.scheduler.ray",
    ),
    "triton": (
        "areal.engine.native.cuda",
        "areal.engine.train.adam_kernels",
        "areal.engine.train.logprob_kernels",
        "areal.models.common.delta_chunk_kernels",
        "areal.models.common.delta_conv_kernels",
        "areal.models.common.delta_kernels",
        "areal.models.common.fp8_kernels",
        "areal.models.common.fp8_training_kernels",
        "areal.models.common.invariant_matmul",
    ),
    "vllm": ("areal.engine.remote.vllm_worker",),
    "wandb": (),
}


def test_extras_are_needed_only_by_their_own_files():
    code = (
        "import importlib, json, pkgutil, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(NEEDS)!r}))\n"
        "import areal\n"
        "failed = []\n"
        "def note(name):\n"
        "    failed.append(name)\n"
        "for found in pkgutil.walk_packages(areal.__path__, 'areal.', onerror=note):\n"
        "    try:\n"
        "        importlib.import_module(found.name)\n"
        "    except ImportError:\n"
        "        note(found.name)\n"
        "print(json.dumps(failed))\n"
    )
    allowed = {name for names in NEEDS.values() for name in names}
    failed = json.loads(run_python(code))
    assert failed, "nothing was blocked"
    strangers = [
        name
        for name in failed
        if not any(name == known or name.startswith(f"{known}.") for known in allowed)
    ]
    assert not strangers, f"import extras where they are used: {strangers}"


def test_import_of_areal_is_quick():
    """It loads the standard library alone: a time would depend on what else the machine does."""
    code = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        "import areal\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))\n"
    )
    loaded = set(json.loads(run_python(code)))
    assert loaded - sys.stdlib_module_names == {"areal"}


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
