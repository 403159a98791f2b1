"""The benchmark runs and reports its rows; how fast anything is, is not asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal.cli.demo import make_model

SCRIPT = Path(__file__).resolve().parents[1] / "benchmark" / "async_speedup.py"


@pytest.mark.slow
def test_async_speedup_reports_every_load(tmp_path):
    make_model(tmp_path / "model")
    report = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--steps", "1", "--model", tmp_path / "model"]
    subprocess.run([*command, "--json", report], check=True, timeout=300)
    written = json.loads(report.read_text())
    assert {"rows", "machine", "date", "commit"} == written.keys()
    rows = {row["name"]: row for row in written["rows"]}
    for load in ("demo", "tail", "env"):
        assert rows[f"speedup_{load}"]["unit"] == "x" and rows[f"speedup_{load}"]["value"] > 0
