"""What the guides in .agents/skills/ cite is there: files, commands, options, Python names, keys.

A code span of a guide is a promise. Each must be one of: a file of the repository, a command of
areal or make, a name in `areal` or in a Python file that the same guide cites, a config key, a
marker of pytest, a variable that areal reads. NAME and RUN stand for what the reader fills in:
`areal/reward/NAME.py` needs only the folder; `RUN/logs/main.log` only a name that areal writes. A
path below runs/ is one that the recipe of the demo reads.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import re
import shlex
import sys
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify
from source_trees import nodes_of

from areal.api.config.section import all_keys
from areal.api.config.trainers import EXPERIMENTS
from areal.cli.main import COMMANDS, add_command

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".agents" / "skills"
GUIDES = sorted(FOLDER.glob("*/SKILL.md"))
MAX_LINES = 100
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"RUN$|(?:^|_)NAME(?:\.|$)")
PYTHON_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
OTHER_PROGRAMS = {"git", "kill"}
OTHER_FOLDERS = ("/tmp/ray/",)  # that another program makes when it first runs


def guide_id(guide: Path) -> str:
    return guide.parent.name


def front_matter(text: str) -> tuple[dict, str]:
    """Its keys, and the text after it."""
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_guides_are_there():
    assert len(GUIDES) >= 11
    assert {path.name for path in FOLDER.iterdir()} == {guide_id(guide) for guide in GUIDES}


@pytest.mark.parametrize("guide", GUIDES, ids=guide_id)
def test_front_matter_says_what_a_guide_is_for(guide):
    text = guide.read_text(encoding="utf-8")
    head, body = front_matter(text)
    assert head.keys() == {"name", "description"}
    assert head["name"] == guide_id(guide)
    assert 20 < len(head["description"]) <= 300
    assert body.lstrip().startswith("# ")
    assert len(text.splitlines()) <= MAX_LINES, "link to a page of docs/ instead of repeating it"


def test_the_index_lists_each_guide():
    listed = LINK.findall((ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    guides = [link for link in listed if link.startswith(".agents/")]
    assert sorted(guides) == [str(guide.relative_to(ROOT)) for guide in GUIDES]


@pytest.mark.parametrize("guide", GUIDES, ids=guide_id)
def test_what_a_guide_cites_exists(guide):
    _, body = front_matter(guide.read_text(encoding="utf-8"))
    faults = faults_of(body, guide.parent)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`areal/reward/no_such.py`", "no such file"),
        ("`areal/no_such/NAME.py`", "no such file"),
        ("`RUN/logs/no_such.log`", "no such file"),
        ("`runs/demo/no_such`", "no such file"),
        ("`/tmp/no_such`", "no such file"),
        ("`REWARD_FN` of `areal/reward/__init__.py`", "neither"),
        ("`no.such.key`", "neither"),
        ("`areal.reward.no_such`", "neither"),
        ("`AREAL_NO_SUCH`", "neither"),
        ("`areal rum`", "no command of areal"),
        ("`make tset`", "no target of the Makefile"),
        ("```bash\nareal trace --fast RUN\n```", "no option of areal trace"),
        ("```bash\nareal check no/such.yaml\n```", "no such file"),
        ("```bash\n.venv/bin/python -m pytest -m quick\n```", "no marker"),
        ("```bash\n.venv/bin/no_such --check\n```", "no program"),
        ("[page](../../../docs/no_such.md)", "no such page"),
        ("[page](../../../docs/operations.md#no-such)", "no such heading"),
    ],
)
def test_a_false_citation_is_found(text, fault):
    (found,) = faults_of(text, FOLDER / "add-reward")
    assert fault in found


def faults_of(body: str, folder: Path) -> list[str]:
    """One line for each citation in `body`, a guide in `folder`, that leads nowhere."""
    blocks = FENCE.findall(body)
    prose = FENCE.sub("", body)
    spans = SPAN.findall(prose)
    cited = [ROOT / span for span in spans if span.endswith(".py") and (ROOT / span).is_file()]
    lines = [line for language, text in blocks if language == "bash" for line in text.splitlines()]
    found = [link_fault(link, folder) for link in LINK.findall(prose)]
    found += [span_fault(span, cited) for span in spans]
    found += [command_fault(line) for line in lines if line.strip()]
    return [fault for fault in found if fault is not None]


def link_fault(link: str, folder: Path) -> str | None:
    if "://" in link:
        return None
    target, _, anchor = link.partition("#")
    page = folder / target
    if not page.is_file():
        return f"{link}: no such page"
    if anchor and anchor not in anchors_of(page.resolve()):
        return f"{link}: no such heading"
    return None


@cache
def anchors_of(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slugify(title, "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def span_fault(span: str, cited: list[Path]) -> str | None:
    if " " in span:
        return command_fault(span)
    if "/" in span or Path(span).suffix in {".md", ".py", ".toml", ".txt", ".yml"}:
        return path_fault(span)
    if is_known_name(span.partition("=")[0].removesuffix("()"), cited):
        return None
    return (
        f"{span}: neither a file, a command, a config key nor a name in a Python file that the "
        "guide cites"
    )


def path_fault(path: str) -> str | None:
    parts = Path(path).parts
    if parts[0] == "RUN":
        known = parts[-1] in source_text()
    elif path.startswith(OTHER_FOLDERS):
        known = True
    elif path.startswith("runs/demo/"):  # what `areal demo` writes, and its recipe reads
        recipe = (ROOT / "examples/math/arithmetic_grpo.yaml").read_text(encoding="utf-8")
        known = path.removeprefix("runs/demo/") in recipe
    else:
        filled_in = [i for i, part in enumerate(parts) if PLACEHOLDER.search(part)]
        known = ROOT.joinpath(*parts[: filled_in[0]] if filled_in else parts).exists()
    return None if known else f"{path}: no such file"


def is_known_name(name: str, cited: list[Path]) -> bool:
    if name == "RUN" or (ROOT / name).exists() or f"{name}/" in ignored_folders():
        return True
    if name.endswith(".json"):  # of a model or a run
        return f'"{name}"' in source_text()
    if PYTHON_NAME.fullmatch(name) is None:
        return False
    if name.startswith("areal."):
        return is_areal_name(name)
    if name.startswith("AREAL_"):
        return f'"{name}"' in source_text()
    return (
        name in config_keys()
        or name in settings_names()
        or hasattr(builtins, name)
        or all(any(part in names_in(file) for file in cited) for part in name.split("."))
    )


@cache
def ignored_folders() -> set[str]:
    return set((ROOT / ".gitignore").read_text(encoding="utf-8").split())


def is_areal_name(name: str) -> bool:
    """A package, a module, or what a module defines."""
    module = ROOT / name.replace(".", "/")
    if module.is_dir() or module.with_suffix(".py").is_file():
        return True
    home, _, last = name.rpartition(".")
    file = (ROOT / home.replace(".", "/")).with_suffix(".py")
    return file.is_file() and last in names_in(file)


@cache
def names_in(file: Path) -> set[str]:
    """Functions, classes, variables and fields that a Python file defines or imports."""
    names = set()
    for node in nodes_of(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@cache
def source_text() -> str:
    files = sorted((ROOT / "areal").rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def config_keys() -> set[str]:
    return {key for cls in EXPERIMENTS.values() for key in all_keys(cls)}


@cache
def settings_names() -> set[str]:
    """Markers of pytest, extras, names of data sets, and keys of mkdocs.yml."""
    from areal.dataset import VALID_DATASETS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(project["project"]["optional-dependencies"])
    return {*markers(), *extras, *VALID_DATASETS, "nav"}


@cache
def markers() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {line.partition(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}


def command_fault(line: str) -> str | None:
    words = shlex.split(line, comments=True)
    if words[0] in OTHER_PROGRAMS:
        return None
    if words[0] == "make":
        return make_fault(words[1:])
    program = words[0].removeprefix(".venv/bin/")
    if program == "areal":
        return areal_fault(words[1:])
    if program != "python" and not (Path(sys.executable).parent / program).exists():
        return f"{line}: no program of .venv"
    return arguments_fault(words[1:])


def make_fault(words: list[str]) -> str | None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split()
    target = words[0]
    return None if target in targets else f"make {target}: no target of the Makefile"


def areal_fault(words: list[str]) -> str | None:
    command, *rest = words
    if command not in COMMANDS:
        return f"areal {command}: no command of areal"
    parser = argparse.ArgumentParser()
    add_command(command, parser)
    options = {name for action in parser._actions for name in action.option_strings}
    for word in rest:
        if word.startswith("--") and word.partition("=")[0] not in options:
            return f"{word}: no option of areal {command}"
    return arguments_fault(rest)


def arguments_fault(words: list[str]) -> str | None:
    """Of paths, modules and markers among the arguments of a program."""
    for before, word in pairwise(["", *words]):
        if before == "-m" and not is_marker_or_module(word.removeprefix("not ")):
            return f"-m {word}: no marker of pytest and no module"
        if "/" in word and "=" not in word and path_fault(word):
            return path_fault(word)
    return None


def is_marker_or_module(name: str) -> bool:
    return name in markers() or importlib.util.find_spec(name) is not None
