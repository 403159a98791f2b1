"""What the documentation says is true: its commands run, its code works, its keys and paths exist.

Every English page of docs/ and README.md is a story, run block by block in a folder of its own (see
docs_world.py). `areal train` is replaced by `areal check` where another test trains: on the pages
of algorithms and of examples, whose recipes `pytest -m examples` runs, and where
test_recipes_learn.py has every command. YAML blocks are loaded: a block with a `trainer` key as it
stands, any other laid over the arithmetic GRPO recipe.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import typing
from pathlib import Path

import pytest
import yaml
from docs_world import LEARNS, ROOT, Block, World, read_blocks
from sandbox_support import needs_sandbox
from source_trees import nodes_of, tree_of

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"  # generated
ZH = DOCS / "zh"  # the same blocks, which tests/test_docs_zh.py compares
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in DOCS.rglob("*.md") if not {REFERENCE, ZH} & set(p.parents)),
]
READS_ITS_RUN = DOCS / "howto" / "agent.md"  # by `areal export`
SECTIONS = (
    "actor|critic|ref|teacher|rollout|native|vllm|sglang|gconfig|recover|saver|evaluator|cluster"
)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:examples|areal|benchmark|tests|docs)/[\w/.-]*\w(?:/|\.\w+)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def stories() -> list:
    """The pages with something to run; those that start a model are slow."""
    params = []
    for page in PAGES:
        blocks = [b for b in read_blocks(page) if b.language in ("bash", "python")]
        if blocks:
            slow = any(b.trains and b.not_run is None for b in blocks) and not is_checked(page)
            marks = [pytest.mark.slow] if slow else []
            marks += [needs_sandbox] if page.name == "sandbox.md" else []
            params.append(pytest.param(page, id=page_id(page), marks=marks))
    return params


def is_checked(page: Path) -> bool:
    """Whether other tests train its recipes, and nothing on the page reads a run of them."""
    if page.parent.name in ("algorithms", "examples"):
        return True
    text = "\n".join(block.text for block in read_blocks(page) if block.not_run is None)
    commands = re.findall(r"^areal train (.+)$", text.replace("\\\n    ", ""), re.MULTILINE)
    learns = tuple(command for _, command, _ in LEARNS)
    return bool(commands) and all(c.startswith(learns) for c in commands) and page != READS_ITS_RUN


@pytest.fixture
def world(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    world = World(tmp_path, check_only=is_checked(request.node.callspec.params["page"]))
    yield world
    world.close()
    for name in set(sys.modules) - known:  # modules a page defined must not leak into another's
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("forked_children")  # for servers that a page's Python starts
@pytest.mark.parametrize("page", stories())
def test_page_runs(page, world):
    for block in read_blocks(page):
        world.run(block)


@pytest.mark.parametrize(
    ("command", "code"), [("areal check nowhere.yaml", 2), ("python fails.py", 1)]
)
def test_a_command_that_fails_fails_its_page(tmp_path, command, code):
    (tmp_path / "fails.py").write_text("raise KeyError('here')\n")
    shown = Block(ROOT / "README.md", 1, "bash", None, command, None, is_script=False)
    world = World(tmp_path)
    try:
        with pytest.raises(AssertionError, match=rf"README.md:1 failed with exit code {code}:"):
            world.run(shown)
    finally:
        world.close()


# What the suite does not have, and nothing else: docs/index.md promises it.
MISSING = (
    "`git clone` needs a network",
    "`pip install` needs a network",
    "installs gigabytes",
    "starts a vLLM server, for which the environment must be there",
    "needs the packages above",
    "needs a CUDA device",
    "needs a GPU and the extra",
    "needs a Ray cluster",
    "needs a Slurm cluster",
    "needs a Kubernetes cluster with KubeRay",
    "needs SkyPilot and an account of a cloud",
    "needs a run that is alive",
    "needs a run that waits for clients",
    "needs lm-eval and inspect-ai",
    "it serves until Ctrl-C",
    "it waits for lines",
    "it needs a finished run",
    "it needs a file of rows",
)


def test_what_is_not_run_is_what_the_suite_cannot_have():
    reasons = {block.not_run for page in PAGES for block in read_blocks(page)} - {None}
    assert reasons == set(MISSING)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_yaml_blocks_load(page, tmp_path):
    from areal.cli.train import load_config

    base = yaml.safe_load((ROOT / "examples/math/arithmetic_grpo.yaml").read_text())
    del base["actor"]["enable_tree_training"]  # blocks are about other back ends, too
    for block in read_blocks(page):
        if block.language != "yaml" or block.not_run is not None:
            continue
        tree = yaml.safe_load(block.text)
        file = tmp_path / "block.yaml"
        file.write_text(yaml.safe_dump(tree if "trainer" in tree else merge(base, tree)))
        try:
            load_config([str(file)])
        except ValueError as error:
            pytest.fail(f"{block.place}: {error}")


def merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    named = {match for span in CODE_SPAN.findall(text) for match in PATH.findall(span)}
    named |= {match for block in read_blocks(page) for match in PATH.findall(block.text)}
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"{page_id(page)} names files that do not exist: {missing}"


def test_links_of_the_readme():
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (ROOT / target).exists()]


def config_keys() -> set[str]:
    """Every dotted key of every trainer's config."""
    from areal.api.config.trainers import EXPERIMENTS

    keys: set[str] = set()
    for cls in EXPERIMENTS.values():
        collect_keys(cls, "", keys)
    return keys


def collect_keys(cls: type, prefix: str, keys: set[str]) -> None:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        keys.add(prefix + field.name)
        options = (hints[field.name], *typing.get_args(hints[field.name]))
        for option in options:
            if dataclasses.is_dataclass(option):
                collect_keys(option, f"{prefix}{field.name}.", keys)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_config_keys_exist(page):
    spans = CODE_SPAN.findall(page.read_text(encoding="utf-8"))
    named = {m[0] for span in spans if (m := re.match(rf"(?:{SECTIONS})\.[a-z_0-9.]+\b", span))}
    unknown = sorted(named - config_keys() - {key for key in named if key.endswith((".py", ".db"))})
    assert not unknown, f"{page_id(page)} names config keys that do not exist: {unknown}"


def test_quoted_errors_are_those_of_the_code():
    """A heading of the troubleshooting page quotes a message; `...` stands for what varies."""
    said = "\n".join(string_constants())
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert headings
    strange = [
        heading
        for heading in headings
        if not all(part.strip() in said for part in heading.split("..."))
    ]
    assert not strange, f"no message of areal reads like this any more: {strange}"


def string_constants() -> list[str]:
    found = []
    for file in sorted((ROOT / "areal").rglob("*.py")):
        for node in nodes_of(file):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(v.value) for v in node.values if isinstance(v, ast.Constant)]
                found.append("\n".join(parts))
    return found


def test_site_builds_and_fetches_nothing(tmp_path):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build(config)  # strict: a warning is an error
    for file in tmp_path.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*src="?(https?:[^" >]+)', text)
        fetched += re.findall(r'<link rel="?(?!canonical)[^>]*href="?(https?:[^" >]+)', text)
        assert not fetched, f"{file.name} fetches {fetched}"
        assert "$<code>" not in text, f"{file.name} has a formula that was not translated"
    assert "<math" in (tmp_path / "algorithms" / "grpo.html").read_text(encoding="utf-8")


HOP = re.compile(r"\|\s*\d+\s*\|\s*`(areal/[\w/]+\.py)`\s*\|\s*`([\w.]+)`\s*\|")


def test_the_step_file_by_file_names_what_is_there():
    hops = HOP.findall((DOCS / "architecture.md").read_text(encoding="utf-8"))
    assert len(hops) > 20
    missing = [f"{file}: {name}" for file, name in hops if not is_defined(ROOT / file, name)]
    assert not missing, missing


def is_defined(file: Path, dotted: str) -> bool:
    """Whether `dotted` (a function, a class or a method) is defined in `file`."""
    found: ast.AST = tree_of(file)
    for name in dotted.split("."):
        inside = [n for n in ast.iter_child_nodes(found) if getattr(n, "name", None) == name]
        if not inside:
            return False
        found = inside[0]
    return True
