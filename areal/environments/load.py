"""The key `env`: from a name to a function that makes one environment per episode.

make = environment_maker("my_package.games.Guess", {"num_guesses": 4})
make = environment_maker("reasoning-gym:chain_sum", {"max_terms": 3})
environment = make()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal.environments.adapters import SkyRLEnv, adapted, is_skyrl
from areal.environments.hubs.catalog import split_name
from areal.environments.hubs.harbor import HarborEnvs
from areal.environments.hubs.remote import HubEnvs
from areal.utils import import_path

EXPECTED = "the import path 'package.module.Class' of an environment"


def environment_maker(
    env: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    """`env` is an import path, a class, a function that returns an environment, or HUB:NAME.

    What it returns may have a `close`, which ends what it has started.
    """
    if isinstance(env, str) and (named := split_name(env)) is not None:
        return (HarborEnvs if named[0] == "harbor" else HubEnvs)(env, kwargs)
    kind = import_path.load(env, key="env") if isinstance(env, str) else env
    name = env if isinstance(env, str) else getattr(env, "__name__", repr(env))
    if is_skyrl(kind):
        return lambda: SkyRLEnv(kind, kwargs, name)
    try:
        inspect.signature(kind).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"env_kwargs do not fit {name}: {error}") from error
    return lambda: adapted(kind(**kwargs), name)
