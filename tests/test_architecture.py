"""Rules of the code base that a test keeps, so that no review has to.

Tiers of imports, the length of a file, a docstring at its top, no torch behind the light doors, and
no `print` outside the command line. Each failure lists file, line and what to do.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "areal"
MAX_LINES = 600

# A package may import packages of lower tiers, at any depth of a function; imports under
# TYPE_CHECKING are free. Packages of one tier do not import each other, but for the exceptions.
TIERS = (
    {"utils", "api"},
    {"algorithm", "dataset", "reward", "models", "weight_sync"},
    {"rollout", "infra", "workflow", "openai", "engine", "planner"},
    {"trainer", "evaluation"},
    {"cli", "dashboard", "tools"},
)
TIER_OF = {package: tier for tier, packages in enumerate(TIERS) for package in packages}
ALLOWED_SIBLINGS = {
    ("utils", "areal.api"),
    ("workflow", "areal.rollout.context"),
    ("openai", "areal.rollout.context"),
    ("cli", "areal.dashboard"),
    ("cli", "areal.tools"),
}
LIGHT_MODULES = ("areal", "areal.api", "areal.cli.main")
HEAVY_PACKAGES = {"torch", "transformers", "datasets", "safetensors", "fastapi", "matplotlib"}


def source_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"


def test_imports_go_down_the_tiers():
    faults = []
    for file in source_files("areal"):
        if file.parent == PACKAGE:
            continue  # the public door loads names of any tier, lazily
        package = file.relative_to(PACKAGE).parts[0]
        for node, target in areal_imports(file):
            fault = import_fault(package, target)
            if fault:
                faults.append(f"{place(file, node)}: {fault}")
    assert not faults, "\n".join(faults)


def import_fault(package: str, target: str) -> str | None:
    """Why a file of areal.{package} may not import the module `target`; None when it may."""
    if package not in TIER_OF:
        return f"areal.{package} has no tier: add it to TIERS"
    if target == "areal.__version__":
        return None
    parts = target.split(".")
    if len(parts) < 2 or parts[1] not in TIER_OF:
        return f"imports {target}: inside the package import from the module that defines the name"
    other = parts[1]
    if other == package or any(
        package == who and f"{target}.".startswith(f"{what}.") for who, what in ALLOWED_SIBLINGS
    ):
        return None
    if TIER_OF[other] < TIER_OF[package]:
        return None
    return f"areal.{package} (tier {TIER_OF[package]}) imports {target} (tier {TIER_OF[other]})"


def areal_imports(file: Path) -> Iterator[tuple[ast.AST, str]]:
    """(node, imported module) for every import of areal that can run."""
    for node in walk_running_code(parse(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from areal.utils import logging`: the name may itself be a module.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node, name) for name in names if name.split(".")[0] == "areal")


def walk_running_code(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from walk_running_code(child)


@pytest.mark.parametrize(
    ("package", "target", "allowed"),
    [
        ("engine", "areal.models.hf_io", True),
        ("engine", "areal.rollout.executor", False),
        ("workflow", "areal.rollout.context", True),
        ("workflow", "areal.rollout.context.stat_scope", True),
        ("workflow", "areal.rollout.ledger", False),
        ("utils", "areal.api.io_struct", True),
        ("api", "areal.utils.logging", False),
        ("reward", "areal.dataset.gsm8k", False),
        ("trainer", "areal.engine.archon_engine", True),
        ("utils", "areal.trainer", False),
        ("trainer", "areal.PPOTrainer", False),
        ("newcomer", "areal.utils", False),
    ],
)
def test_the_tier_rule_itself(package, target, allowed):
    assert (import_fault(package, target) is None) == allowed


def test_relative_imports_are_not_used():
    faults = [
        place(file, node)
        for file in source_files("areal", "tests")
        for node in ast.walk(parse(file))
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
        if not ast.get_docstring(parse(file))
    ]
    assert not silent, f"add a docstring at the top: {silent}"


def test_print_only_in_the_command_line():
    faults = [
        place(file, node)
        for file in source_files("areal")
        if PACKAGE / "cli" not in file.parents
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
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


def test_import_of_areal_is_quick():
    code = "import time; t = time.perf_counter(); import areal; print(time.perf_counter() - t)"
    # The best of three: other work on the machine slows one down, never speeds one up.
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
