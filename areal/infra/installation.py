"""Is everything here that areal needs?

    for finding in validate():
        print(finding)              # ok   torch            2.11.0

Python, every required package, the device and its kernels, every extra, sandboxes, shared memory,
and the environments of stock servers. What is optional is only reported, with the command that
installs it. A Ray cluster is looked at by cluster_check.py.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from areal.sandbox.isolation import SandboxError
from areal.sandbox.session import Session
from areal.utils.server_envs import find_interpreter

_SERVERS = ("sglang", "vllm")
_SHARED = Path("/dev/shm")
_ENOUGH_SHARED = 1 << 30  # bytes; weights of larger models need more, and have other ways
_ASK_S = 60.0


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


def verdict(findings: Iterable[Finding]) -> tuple[int, str]:
    """(exit code, last line)."""
    faults = sum(finding.is_fatal for finding in findings)
    return (1, f"{faults} required parts are missing") if faults else (0, "areal can run here")


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
    yield _kernels()
    for extra in sorted(areal.get_all("Provides-Extra") or ()):
        if extra not in ("dev", "docs"):
            yield check_extra(extra, requirements)
    yield _sandbox()
    yield _shared_memory()
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


def _kernels() -> Finding:
    """Whether a kernel of areal compiles, runs and computes what torch does."""
    try:
        import torch

        if not torch.cuda.is_available():
            return Finding("kernels", "none: a CPU needs none")
        from areal.models.common.invariant_matmul import invariant_matmul

        x, weight = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16).unbind()
        gap = (invariant_matmul(x, weight, None) - x @ weight.T).abs().max().item()
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("kernels", f"Triton does not run: {error}", "install triton again", True)
    return Finding("kernels", "compiled", "" if gap < 0.5 else "they compute wrong numbers", True)


def _sandbox() -> Finding:
    async def start() -> None:
        async with await Session.start():
            pass

    try:
        asyncio.run(start())
    except SandboxError as error:
        return Finding("sandbox", "no sessions", str(error))
    return Finding("sandbox", "sessions start")


def _shared_memory() -> Finding:
    if not _SHARED.is_dir():
        return Finding("shared memory", f"no {_SHARED}", "weights travel by disk")
    free = shutil.disk_usage(_SHARED).free
    advice = "" if free >= _ENOUGH_SHARED else "little for weights (docker run --shm-size=16g)"
    return Finding("shared memory", f"{free / 2**30:.1f} GiB free", advice)


def _server(kind: str) -> Finding:
    name = f"{kind} server"
    try:
        python = find_interpreter(kind, "")
    except ValueError:
        return Finding(name, "no environment", f"areal env create {kind}")
    code = f"import importlib.metadata; print(importlib.metadata.version({kind!r}))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, f"{python} does not run: {error}", f"areal env create {kind}")
    if asked.returncode != 0:
        return Finding(name, f"{python} has no {kind}", f"areal env create {kind}")
    return Finding(name, f"{asked.stdout.strip()} in {python}")
