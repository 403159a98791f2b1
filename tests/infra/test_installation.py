"""The installation check: a line for each part, and an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from areal.cli.main import main
from areal.infra.installation import check_extra, check_package

PARTS = ("python", "torch", "transformers", "device", "kernels", "[ray]", "sandbox", "vllm server")


def test_the_installation_of_these_tests_is_whole(capsys):
    code = main(["validate"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and lines[-1] == "areal can run here", lines
    for part in PARTS:
        assert any(line[5:].startswith(part) for line in lines), part


def test_it_has_the_name_of_areals_documents_too():
    command = [sys.executable, "-m", "areal.tools.validate_installation"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout.endswith("areal can run here\n"), done.stderr


def test_an_environment_of_a_server_that_is_broken(monkeypatch, capsys):
    monkeypatch.setenv("AREAL_VLLM_PYTHON", "/bin/false")
    assert main(["validate"]) == 0  # servers are optional
    out = capsys.readouterr().out
    assert "--   vllm server      /bin/false has no vllm: areal env create vllm" in out


@pytest.mark.parametrize(
    ("requirement", "state"), [("torch>=999", "2."), ("no-such-package>=1.0", "not installed")]
)
def test_a_missing_or_old_package_is_fatal_and_says_how_to_get_it(requirement, state):
    finding = check_package(Requirement(requirement))
    assert finding.is_fatal and finding.state.startswith(state)
    assert f"pip install '{requirement}'" in str(finding) and str(finding).startswith("FAIL")


def test_an_extra_is_optional():
    wanted = [Requirement("no-such-package>=1.0; extra == 'more'")]
    finding = check_extra("more", wanted)
    assert not finding.is_fatal and "lacks no-such-package" in str(finding)
    assert finding.advice == "pip install 'areal[more]'"
    assert check_extra("other", wanted).advice == ""
