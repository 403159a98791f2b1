"""docs/reference/ is what docs/generate_config_reference.py makes of the code as it is now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from areal.api.config.section import all_keys
from areal.api.config.trainers import EXPERIMENTS
from areal.cli.main import COMMANDS

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "generate_config_reference.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    return {file.name: text for file, text in generator.pages().items()}


@pytest.mark.parametrize("name", ["config.md", "cli.md"])
def test_committed_page_is_up_to_date(generator: ModuleType, pages: dict[str, str], name: str):
    committed = (generator.FOLDER / name).read_text(encoding="utf-8")
    assert committed == pages[name], f"run .venv/bin/python {SCRIPT}"


def test_every_key_is_on_the_page(pages: dict[str, str]) -> None:
    names = {key.rpartition(".")[2] for root in EXPERIMENTS.values() for key in all_keys(root)}
    assert not [name for name in names if f"| `{name}` " not in pages["config.md"]]


def test_every_key_has_a_meaning_and_every_link_a_place(pages: dict[str, str]) -> None:
    lines = pages["config.md"].splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert all(row[-1].strip(" |") for row in rows)
    anchors = {line.removeprefix("## ").lower() for line in lines if line.startswith("## ")}
    text = pages["config.md"]
    links = {part.partition(")")[0] for part in text.split("](#")[1:]} - {"every-trainer"}
    assert links <= anchors


def test_every_command_and_option_is_on_the_page(pages: dict[str, str]) -> None:
    assert all(f"## areal {name}\n" in pages["cli.md"] for name in COMMANDS)
    for option in ("`--out OUT`", "`--fresh`", "`--config FILE`", "`--model MODEL`"):
        assert option in pages["cli.md"]
