"""docs/metrics.md names the statistics of the code: none is missing, none is made up.

Runs are compared with it where they happen: trainer/test_grpo_run.py, trainer/test_offline_runs.py
and test_examples.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from metrics_page import documented, undocumented
from source_trees import nodes_of

AREAL = Path(__file__).resolve().parents[1] / "areal"
RECORDING = ("stats_tracker.stat", "stats_tracker.denominator")  # names are keywords


@pytest.fixture(scope="module")
def nodes() -> list[ast.AST]:
    files = sorted(AREAL.rglob("*.py"))
    return [node for file in files for node in nodes_of(file)]


def keywords_of(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg is not None}


def records(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr == "scalar" or ast.unparse(call.func) in RECORDING


def test_what_the_code_records_is_on_the_page(nodes):
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    recorded = {name for call in calls if records(call) for name in keywords_of(call)}
    assert recorded >= {"entropy", "reward", "explained_variance"}
    last = {name.removesuffix("/avg").rpartition("/")[2] for name in documented()}
    assert recorded <= last, f"docs/metrics.md lacks {sorted(recorded - last)}"


def test_every_timed_phase_is_on_the_page(nodes):
    phases = {
        ast.literal_eval(node.args[0])
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "phase"
    }
    assert phases >= {"rollout", "train"}
    assert undocumented(f"timeperf/{name}" for name in phases) == []


def test_what_is_on_the_page_is_in_the_code(nodes):
    """As a keyword, or as a part of a string such as `rollout/reward`."""
    words = {"avg", "min", "max"}
    for node in nodes:
        if isinstance(node, ast.Call):
            words |= keywords_of(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.update(node.value.split("/"))
    names = documented()
    assert len(names) == len(set(names))
    parts = {part for name in names for part in name.split("/") if not part.isupper()}
    assert parts <= words, f"no statistic of areal is named {sorted(parts - words)}"


def test_what_varies_is_matched():
    named = ["rollout/failed/TimeoutError", "actor/entropy/min", "actor/prox/linear/logp_error/max"]
    assert undocumented(named) == []
    assert undocumented(["rollout/failed/", "actor/entropy", "nothing"]) == [
        "actor/entropy",
        "nothing",
        "rollout/failed/",
    ]
