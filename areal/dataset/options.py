"""Loaders that hand `dataset_kwargs` on to a function: which ones that function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def known_options(
    options: dict[str, Any], function: Callable[..., Any], *, besides: tuple[str, ...]
) -> dict[str, Any]:
    """`options`, all of them parameters of `function`.

    `besides` are keys the loader takes itself; an error lists them too.
    """
    known = {*inspect.signature(function).parameters, *besides} - {"split"}
    for name in options:
        if name not in known - {*besides}:
            raise ValueError(
                f"dataset_kwargs.{name}: unknown; expected one of {', '.join(sorted(known))}"
            )
    return options
