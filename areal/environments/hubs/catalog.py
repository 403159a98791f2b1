"""The hubs: their packages, pinned, and `env: HUB:NAME` in a config.

    split_name("reasoning-gym:chain_sum")     ("reasoning-gym", "chain_sum"); None: an import path
    hub_interpreter("reasoning-gym")          the Python that has its packages

Their packages exclude ours and each other's, so that each has an environment of its own, made by
`areal env create HUB`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from areal.utils.server_envs import default_folder, interpreter_variable


@dataclass(frozen=True, slots=True)
class Hub:
    requirements: tuple[str, ...]
    module: str  # imported at the end of the installation as a test
    name: str  # what follows the colon
    example: str
    python: tuple[int, int] = (3, 11)  # the oldest that its packages run on


HUBS = {
    "harbor": Hub(
        requirements=("harbor==0.24.0",),
        module="harbor.models.task.task",
        name="FOLDER",
        example="tasks",
        python=(3, 12),
    ),
    "openenv": Hub(
        requirements=("openenv==0.10.0",),
        module="openenv.core.generic_client",
        name="URL",
        example="http://127.0.0.1:8000",
    ),
    "reasoning-gym": Hub(
        requirements=("reasoning-gym==0.1.25",),
        module="reasoning_gym",
        name="TASK",
        example="chain_sum",
    ),
    "textarena": Hub(
        requirements=("textarena==0.7.4",),
        module="textarena",
        name="GAME",
        example="GuessTheNumber-v0",
    ),
    "verifiers": Hub(
        requirements=("verifiers==0.4.0",),
        module="verifiers.v1.taskset",
        name="NAME",
        example="my_taskset",
    ),
}


def split_name(env: str) -> tuple[str, str] | None:
    """(hub, name); None if `env` names no hub. ValueError for a hub that nobody knows."""
    hub, colon, name = env.partition(":")
    if not colon:
        return None
    if hub not in HUBS:
        raise ValueError(
            f"env: {env!r:.200} names no known hub; hubs are {', '.join(HUBS)} (reasoning-gym:"
            "chain_sum), and a class of yours is an import path 'package.module.Class'"
        )
    if not name:
        known = HUBS[hub]
        raise ValueError(f"env: {env!r} lacks a {known.name}, as in {hub}:{known.example}")
    return hub, name


def hub_interpreter(hub: str) -> str:
    """ValueError with the command that makes one if there is none."""
    variable = interpreter_variable(hub)
    given = os.environ.get(variable)
    path = given or str(default_folder(hub) / "bin" / "python")
    if os.path.isfile(path) and os.access(path, os.X_OK):
        return os.path.abspath(path)
    found = f"{variable} is {given!r}, which is no program" if given else f"there is no {path}"
    raise ValueError(
        f"env: {hub} is not installed: {found}; run `areal env create {hub}`, or set {variable} to "
        "the python of an environment that has it"
    )


def check_env(env: str) -> bool:
    """Whether `env` names a hub; ValueError if that cannot be used here."""
    named = split_name(env)
    if named is None:
        return False
    hub, name = named
    hub_interpreter(hub)
    if hub == "harbor" and not os.path.isdir(name):
        raise ValueError(f"env: {env}: there is no folder {os.path.abspath(name)}")
    return True
