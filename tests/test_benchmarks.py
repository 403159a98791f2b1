"""The benchmarks run and report their rows; how fast anything is, is not asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal.cli.demo import make_model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmark"
KEYS = {"rows", "machine", "date", "commit"}


def run(script: str, *arguments: str | Path) -> None:
    command = [sys.executable, BENCHMARKS / script, *arguments]
    subprocess.run(command, check=True, timeout=300)


@pytest.mark.slow
def test_async_speedup_reports_every_load(tmp_path):
    make_model(tmp_path / "model")
    report = tmp_path / "report.json"
    run("async_speedup.py", "--steps", "1", "--model", tmp_path / "model", "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS
    rows = {row["name"]: row for row in written["rows"]}
    for load in ("demo", "tail", "env"):
        assert rows[f"speedup_{load}"]["unit"] == "x" and rows[f"speedup_{load}"]["value"] > 0


@pytest.mark.slow
def test_algorithms_reports_accuracy_and_draws_it_again_from_its_report(tmp_path):
    make_model(tmp_path / "model")
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    options = ("--steps", "1", "--jobs", "2", "--only", "grpo", "--json", report)
    run("algorithms.py", "--model", tmp_path / "model", *options)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS | {"curves"}
    names = [row["name"] for row in written["rows"]]
    assert names == [f"grpo_staleness_{eta}_accuracy" for eta in (0, 2, 8)]
    run("algorithms.py", "--results", report, "--plot", plot, "--curves", tmp_path / "curves")
    assert plot.stat().st_size and (tmp_path / "curves" / "grpo.png").stat().st_size
