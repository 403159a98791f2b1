"""Files for the project's hosts: workflows, issue forms, containers, the release.

Hosts alone can run most of them, so what a test can see is checked: YAML with the fields that its
reader wants, actions and base images that are pinned, files that exist. The wheel of the release is
built.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import areal

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "ARG", "ENV", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


def read_yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def workflow() -> dict:
    return read_yaml(GITHUB / "workflows" / "ci.yml")


def test_the_pass_runs_on_every_supported_python_and_machine(workflow):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == supported
    machines = job["strategy"]["matrix"]["machine"]
    assert len(machines) == 2 and sum(machine.endswith("-arm") for machine in machines) == 1
    (run,) = [step for step in job["steps"] if step.get("run") == ".ci/run"]
    assert run["env"] == {"PYTHON": "python${{ matrix.python }}"}
    assert "PYTHON ?= python3" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_workflow_may_only_read_and_its_actions_are_pinned(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    assert True in workflow or "on" in workflow  # YAML 1.1 reads the key `on` as true
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] <= 360
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert actions
    assert not [action for action in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_have_what_the_host_wants(form):
    tree = read_yaml(form)
    assert tree.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in tree["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_both_forms_and_the_template_of_pull_requests_are_there():
    assert [form.stem for form in FORMS] == ["bug", "feature"]
    assert "How it was tested" in (GITHUB / "pull_request_template.md").read_text(encoding="utf-8")


def test_every_file_has_an_owner():
    lines = (GITHUB / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    rules = [line.split() for line in lines if line and not line.startswith("#")]
    assert rules[0][0] == "*"
    for pattern, *owners in rules:
        assert pattern == "*" or (ROOT / pattern.strip("/")).exists(), pattern
        assert owners and all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", owner) for owner in owners)


def test_dependabot_looks_where_something_is():
    tree = read_yaml(GITHUB / "dependabot.yml")
    assert tree["version"] == 2
    places = {entry["package-ecosystem"]: entry["directory"] for entry in tree["updates"]}
    assert places == {"github-actions": "/", "docker": "/docker"}
    assert all(entry["schedule"]["interval"] for entry in tree["updates"])


def read_dockerfile(text: str) -> list[tuple[str, str]]:
    """(instruction, the rest) in order; lines that end with a backslash go on."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_a_container_is_pinned_unprivileged_and_starts_areal(file):
    steps = read_dockerfile(file.read_text(encoding="utf-8"))
    assert steps[0][0] == "FROM" and {name for name, _ in steps} <= INSTRUCTIONS
    stages = [rest.split() for name, rest in steps if name == "FROM"]
    for image, *_ in stages:
        assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+", image), f"{image}: pin it by a tag"
    last = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    final = dict(steps[last:])
    assert int(final["USER"]) > 0
    assert json.loads(final["ENTRYPOINT"]) == ["areal"]
    assert isinstance(json.loads(final["CMD"]), list)
    assert not [rest for name, rest in steps if name == "RUN" and "latest" in rest]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_what_a_container_copies_exists_and_is_not_ignored(file):
    for name, rest in read_dockerfile(file.read_text(encoding="utf-8")):
        if name == "COPY" and not rest.startswith("--from="):
            *sources, _ = shlex.split(rest)
            for source in sources:
                assert (ROOT / source).exists(), source
                assert is_sent(source), f"{source} is not in the build's context: .dockerignore"


def is_sent(path: str) -> bool:
    """Whether .dockerignore leaves `path` in the context: the last line that matches counts."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = True
    for line in lines:
        if line and not line.startswith("#") and fnmatch(path, line.removeprefix("!")):
            sent = line.startswith("!")
    return sent


def test_the_page_on_containers_builds_each_of_them():
    text = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"--file (\S+)", text)
    assert sorted(named) == [str(file.relative_to(ROOT)) for file in DOCKERFILES]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_says_what_is_left_to_do(release):
    todo = release.left_to_do("1.2.0", changelog="## Unreleased\n", tags=["v1.1.0"], changes="")
    assert [step.split()[0] for step in todo] == ["in", "git", "git"]
    assert "rename the section Unreleased to 1.2.0" in todo[0]
    assert todo[1].startswith("git tag --annotate v1.2.0")
    ready = release.left_to_do("1.2.0", changelog="## 1.2.0 (today)\n", tags=[], changes="")
    assert ready == todo[1:]


def test_a_release_that_cannot_be_says_why(release):
    dirty, *_ = release.left_to_do("1.2.0", changelog="## 1.2.0\n", tags=[], changes=" M README.md")
    assert "git status" in dirty
    (known,) = release.left_to_do("1.2.0", changelog="## 1.2.0\n", tags=["v1.2.0"], changes="")
    assert "raise __version__" in known


def test_the_wheel_has_all_of_the_package_and_the_recipes_of_the_demo(release, tmp_path):
    pytest.importorskip("hatchling", reason="the extra dev has hatchling, which builds the wheel")
    assert release.version() == areal.__version__
    wheel = release.build(tmp_path, isolated=False)
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        scripts = archive.read(f"areal-{areal.__version__}.dist-info/entry_points.txt").decode()
    assert "areal = areal.cli.main:main" in scripts
    command = ["git", "ls-files", "areal", "examples/math"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    expected = {file.replace("examples/", "areal/examples/", 1) for file in files.split()}
    assert expected <= packed
    foreign = {name.split("/")[0] for name in packed} - {"areal"}
    assert foreign == {f"areal-{areal.__version__}.dist-info"}
