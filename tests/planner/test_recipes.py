"""Recipes for GPUs, those that name a model of a hub: each loads, and fits on H200s as laid out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal.cli.main import main

ROOT = Path(__file__).parents[2]
OF_A_HUB = re.compile(r"^  path: \w+/[A-Z]", re.MULTILINE)
RECIPES = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "examples").glob("*/*.yaml"))
    if OF_A_HUB.search(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_for_gpus_fits(recipe, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AREAL_ADMIN_API_KEY", "a-secret-of-some-length")  # of online agents
    assert main(["plan", "--device", "h200", recipe]) == 0, capsys.readouterr().err
    assert "NVIDIA H200" in capsys.readouterr().out


def test_there_are_recipes_for_gpus():
    assert len(RECIPES) > 20
