"""What the documentation tells a reader to train, learns: the reward rises.

Each recipe of the how-to pages and of the quickstart, and those that learn from several turns or
from pairs, are trained as they stand there, from the demo's warm start, for fewer steps (LEARNS in
docs_world.py) and, without the steps for a warm-up, at no more than half of the demo's rate. The
plain recipe, that of a data set and those of pairs are asked for problems they were not trained on.
The others, which differ from the plain one by who plays or judges an episode and by the loss, are
trained on the same few problems in every step, whose reward rises in ten steps by many times what
chance does.

The other recipes of the algorithms are in benchmark/algorithms.py, whose committed result shows
their curves; that they rose is checked here too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from statistics import fmean

import pytest
from cli_process import Program
from docs_world import GRPO, LEARNS, ROOT, read_blocks
from filelock import FileLock
from tiny_run import query

from areal.cli.demo import SFT_RECIPE, make_model, recipe_path

pytestmark = pytest.mark.usefixtures("forked_children")

DOCS = ROOT / "docs"
PPO = "examples/multi_turn_math/arithmetic_ppo.yaml"
PLAIN = f"{GRPO} actor.optimizer.lr"


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
    on_few_problems = command.startswith((GRPO, PPO)) and not command.startswith(PLAIN)
    if on_few_problems:
        num_problems = 16 if "Agent" in command else 32  # its client costs more than the model
        fewer.append(f"train_dataset.batch_size={num_problems}")
        fewer.append(f"train_dataset.dataset_kwargs.num_rows={num_problems}")
    fewer.append(f"evaluator.eval_before_train={'false' if on_few_problems else 'true'}")
    areal(*line.split()[1:], *fewer, cwd=tmp_path)
    (run,) = [file.parent for file in tmp_path.glob("runs/**/short/run.db")]
    if on_few_problems:
        rewards = figures(run, "rollout/reward")
        before, after, rise = fmean(rewards[:2]), fmean(rewards[-4:]), 0.1
    else:
        held_out = "eval/reward_accuracy" if "alignment" in command else "eval/reward"
        before, *_, after = figures(run, held_out)
        rise = 0.03
    assert after >= before + rise, f"{command}: {before:.3f} -> {after:.3f}"


def figures(run: Path, name: str) -> list[float]:
    """Of each step that has it."""
    stats = [json.loads(row) for (row,) in query(run, "SELECT stats FROM steps ORDER BY step")]
    return [step[name] for step in stats if name in step]


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
