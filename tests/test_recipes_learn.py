"""What the documentation tells a reader to train, learns: the held-out reward rises.

Each recipe of the how-to pages and of the quickstart, and those that learn from several turns or
from pairs, are trained as they stand there, from the demo's warm start, for fewer steps (LEARNS in
docs_world.py) and, without the steps for a warm-up, at no more than half of the demo's rate. The
other recipes of the algorithms are in benchmark/algorithms.py, whose committed result shows their
curves; that they rose is checked here too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cli_process import Program
from docs_world import GRPO, LEARNS, ROOT, read_blocks
from filelock import FileLock
from tiny_run import query

from areal.cli.demo import SFT_RECIPE, make_model, recipe_path

DOCS = ROOT / "docs"
PPO = "examples/multi_turn_math/arithmetic_ppo.yaml"


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory) -> Path:
    """The demo's model after its warm start, made once for all workers of the suite."""
    out = tmp_path_factory.getbasetemp().parent / "warm_start"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            make_model(out / "tiny_model")
            areal("train", recipe_path(SFT_RECIPE), f"cluster.fileroot={out}", cwd=ROOT)
    return out / "arithmetic" / "sft" / "model"


def areal(*argv: str, cwd: Path) -> None:
    path = os.pathsep.join([str(cwd), os.environ.get("PYTHONPATH", "")])
    program = Program(*argv, cwd=cwd, env={"PYTHONPATH": path})
    ended = program.wait(3600)  # minutes alone on a machine
    assert ended.code == 0, ended.err[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "steps"), LEARNS)
def test_the_recipe_learns(tmp_path, warm_start, page, command, steps):
    source = (DOCS / page).read_text(encoding="utf-8").replace("\\\n    ", "")
    (line,) = {line for line in source.splitlines() if line.startswith(f"areal train {command}")}
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for block in read_blocks(DOCS / page):
        if block.title is not None:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
    model = tmp_path / "runs" / "demo" / "arithmetic" / "sft" / "model"
    model.parent.mkdir(parents=True)
    model.symlink_to(warm_start)
    fewer = [f"total_train_steps={steps}", "evaluator.freq_steps=null", "trial_name=short"]
    if command.startswith((GRPO, PPO)) and "optimizer.lr" not in line:
        # That of the recipe is warmed up for 16 steps of 400, and a short run has no such steps.
        fewer.append("actor.optimizer.lr=5e-4")
    if "Agent" in command:  # an agent's evaluation takes as long as ten steps
        fewer.append("valid_dataset.dataset_kwargs.num_rows=400")
    areal(*line.split()[1:], *fewer, "evaluator.eval_before_train=true", cwd=tmp_path)
    (run,) = [file.parent for file in tmp_path.glob("runs/**/short/run.db")]
    figure = "eval/reward_accuracy" if "alignment" in command else "eval/reward"
    before, after = held_out(run, figure)
    assert after >= before + 0.03, f"{command}: {before:.3f} -> {after:.3f}"


def held_out(run: Path, figure: str) -> tuple[float, float]:
    stats = [json.loads(row) for (row,) in query(run, "SELECT stats FROM steps ORDER BY step")]
    found = [step[figure] for step in stats if figure in step]
    return found[0], found[-1]


def test_the_recipes_of_the_algorithms_rose():
    """By the committed result of benchmark/algorithms.py, at the staleness the recipes have."""
    result = json.loads((ROOT / "benchmark" / "results" / "algorithms.json").read_text())
    reached = {row["name"]: row["value"] for row in result["rows"]}
    text = "\n".join(page.read_text() for page in sorted((DOCS / "algorithms").glob("*.md")))
    named = set(
        re.findall(r"^areal train examples/math/arithmetic_(\w+)\.yaml", text, re.MULTILINE)
    )
    policies = sorted(named - {"sft"})
    assert len(policies) > 20
    slow = [name for name in policies if reached[f"{name}_staleness_2_accuracy"] < 0.7]
    assert not slow, "from 0.36 after the warm start"
