"""A run whose parts say their secrets aloud: nothing it leaves behind holds one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_process import Program
from tiny_run import overrides, query

from areal.cli.demo import recipe_path

pytestmark = pytest.mark.usefixtures("forked_children")

SECRETS = {
    "key": "jk-0123456789abcdef",
    "url password": "swordfish-of-the-judge",
    "environment": "hunter2hunter2",
}


def test_no_secret_is_left_behind(tmp_path):
    given = {"judge_api_key": SECRETS["key"], "judge_url": "${oc.env:JUDGE_URL}"}
    arguments = ", ".join(f"{name}: '{value}'" for name, value in given.items())
    process = Program(
        "train",
        recipe_path("arithmetic_grpo.yaml"),
        *overrides(tmp_path, "workflow=leaky_parts.LeakyWorkflow", "trial_name=leaky"),
        f"workflow_kwargs={{{arguments}}}",
        "perf_tracer.enabled=true",
        cwd=tmp_path,
        env={
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
            "JUDGE_URL": f"https://judge:{SECRETS['url password']}@example.org/v1",
            "JUDGE_PASSWORD": SECRETS["environment"],
        },
    )
    out, err = process.communicate(timeout=900)
    assert process.returncode == 1, err
    assert "the judge refused <hidden> <hidden> <hidden>" in err

    run_dir = next(path.parent for path in tmp_path.rglob("run.db"))
    log = (run_dir / "logs" / "main.log").read_text()
    assert "Authorization: Bearer <hidden>" in log and "Traceback" in log
    assert "judge_api_key: <hidden>" in (run_dir / "config.yaml").read_text()
    reasons = query(run_dir, "SELECT why FROM tasks WHERE state = 'failed'")
    assert any("the judge refused <hidden>" in why for (why,) in reasons)
    for name, secret in SECRETS.items():
        assert secret not in out + err, f"{name} is on the console"
        for file in run_dir.rglob("*"):
            if file.is_file():
                assert secret.encode() not in file.read_bytes(), f"{name} is in {file}"
