"""The installation check: a line for each part, and an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from areal.tools.validate_installation import check_extra, check_package


def test_the_installation_of_these_tests_is_whole():
    command = [sys.executable, "-m", "areal.tools.validate_installation"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "areal can run here", done.stdout + done.stderr
    for part in ("python", "torch", "transformers", "device", "[ray]", "vllm server"):
        assert any(line[5:].startswith(part) for line in lines), part


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
