"""Python environments of stock inference servers and hubs: which interpreter starts one.

Their packages pin versions that conflict with ours, so each kind has its own environment. Order of
lookup: the config, the variable AREAL_VLLM_PYTHON (AREAL_SGLANG_PYTHON), the default folder of
`areal env create`.
"""

from __future__ import annotations

import os
from pathlib import Path


def default_folder(kind: str) -> Path:
    """The environment that `areal env create KIND` makes; AREAL_ENVS moves all of them."""
    root = os.environ.get("AREAL_ENVS") or Path.home() / ".cache" / "areal" / "envs"
    return Path(root) / kind


def interpreter_variable(kind: str) -> str:
    return f"AREAL_{kind.upper().replace('-', '_')}_PYTHON"


def find_interpreter(kind: str, configured: str = "") -> str:
    """Path of the interpreter that has the packages of `kind`; ValueError if there is none.

    It is neither run nor resolved here: the link itself selects the environment.
    """
    variable = interpreter_variable(kind)
    given = {f"{kind}.python": configured, variable: os.environ.get(variable, "")}
    for source, path in given.items():
        if path:
            return _checked(source, path)
    found = default_folder(kind) / "bin" / "python"
    if not found.is_file():
        raise ValueError(
            f"{kind}.python: there is no environment with {kind} in {default_folder(kind)}; run "
            f"`areal env create {kind}`, or set the key to the python of one"
        )
    return str(found)


def _checked(source: str, path: str) -> str:
    if not (os.path.isfile(path) and os.access(path, os.X_OK)):
        raise ValueError(f"{source}: {path!r} is not a program; expected the python of a venv")
    return os.path.abspath(path)
