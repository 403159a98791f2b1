"""`python -m areal.tools.validate_installation`: is everything here that areal needs?

One line each for Python, every required package, the device, every extra, and the environments of
stock servers. Exit code 0 if training can run, 1 if something required is missing or too old. What
is optional is only reported, with the command that installs it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from areal.utils.server_envs import find_interpreter

_SERVERS = ("sglang", "vllm")


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: str  # what was found
    advice: str = ""  # empty: nothing is to be done
    is_required: bool = False

    @property
    def is_fatal(self) -> bool:
        return self.is_required and bool(self.advice)

    def __str__(self) -> str:
        mark = "FAIL" if self.is_fatal else "--" if self.advice else "ok"
        advice = f": {self.advice}" if self.advice else ""
        return f"{mark:<4} {self.name:<16} {self.state}{advice}"


def main() -> int:
    findings = list(validate())
    for finding in findings:
        print(finding)
    faults = sum(finding.is_fatal for finding in findings)
    print(f"{faults} required parts are missing" if faults else "areal can run here")
    return 1 if faults else 0


def validate() -> Iterator[Finding]:
    try:
        areal = importlib.metadata.metadata("areal")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("areal", "not installed", "run pip install -e . in its folder", True)
        return
    wanted = areal["Requires-Python"] or ""
    is_right = platform.python_version() in SpecifierSet(wanted)
    advice = "" if is_right else f"areal needs Python {wanted}"
    yield Finding("python", platform.python_version(), advice, True)
    requirements = [Requirement(line) for line in importlib.metadata.requires("areal") or ()]
    for requirement in requirements:
        if requirement.marker is None:
            yield check_package(requirement)
    yield _device()
    for extra in sorted(areal.get_all("Provides-Extra") or ()):
        if extra not in ("dev", "docs"):
            yield check_extra(extra, requirements)
    for kind in _SERVERS:
        yield _server(kind)


def check_package(requirement: Requirement) -> Finding:
    """A package that areal cannot do without."""
    name = requirement.name
    install = f"pip install '{requirement}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", install, True)
    is_new = requirement.specifier.contains(version, prereleases=True)
    return Finding(name, version, "" if is_new else install, True)


def check_extra(extra: str, requirements: list[Requirement]) -> Finding:
    """The packages of one extra."""
    missing = [
        finding.name
        for requirement in requirements
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and (finding := check_package(requirement)).advice
    ]
    if not missing:
        return Finding(f"[{extra}]", "installed")
    return Finding(f"[{extra}]", f"lacks {', '.join(missing)}", f"pip install 'areal[{extra}]'")


def _device() -> Finding:
    try:
        import torch

        if torch.cuda.is_available():
            return Finding(
                "device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
            )
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("device", f"torch does not load: {error}", "install torch again", True)
    return Finding("device", "CPU only", "small models train here; larger ones need a GPU")


def _server(kind: str) -> Finding:
    try:
        return Finding(f"{kind} server", str(find_interpreter(kind, "")))
    except ValueError:
        return Finding(f"{kind} server", "no environment", f"areal env create {kind}")


if __name__ == "__main__":
    sys.exit(main())
