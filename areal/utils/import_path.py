"""Functions and classes by import path, and whether they can be called as documented.

`load("package.module.name")` imports one; `load_named` also accepts the short names of a package's
table. Every mistake in the YAML is one ValueError that starts with the config key.

`Call` checks a user's function before it is called:

    Call("fn(inputs, **kwargs)", 1, {"floor"}).require(signature, "policy_loss: m.f")
    # ValueError: policy_loss: m.f(inputs) cannot be called as fn(inputs, **kwargs): got an unex...

`areal check` passes a signature read from the source (`cli/static_import.py`), others the real one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


def load_named(name: str, table: Mapping[str, str], *, key: str) -> Any:
    """The object of `name` in `table` ({short name: import path}), or at an import path."""
    if name in table:
        return load(table[name], key=key)
    if "." not in name:
        known = ", ".join(sorted(table))
        raise ValueError(
            f"{key}: unknown name {name!r}{_suggestion(name, table)}; expected one of {known}, "
            "or an import path 'package.module.name'"
        )
    return load(name, key=key)


def load(path: str, *, key: str) -> Any:
    """The function or class `package.module.name`. Errors start with the config key `key`."""
    found = load_object(path, key=key)
    if not callable(found):
        raise ValueError(f"{key}: {path!r} is {found!r:.200}, expected a function or a class")
    return found


def load_object(path: str, *, key: str) -> Any:
    """The object at `package.module.name`."""
    module_name, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in path.split(".")) or not module_name:
        raise ValueError(f"{key}: expected an import path 'package.module.name', got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # runs user code: any exception is why the import fails
        raise ValueError(
            f"{key}: cannot import {path!r}: {type(error).__name__}: {error}; check the path, and "
            "that its folder is on PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        suggestion = _suggestion(name, [n for n in vars(module) if not n.startswith("_")])
        raise ValueError(f"{key}: module {module_name!r} has no {name!r}{suggestion}")
    return getattr(module, name)


def _suggestion(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True, slots=True)
class Call:
    """How a function is called."""

    text: str  # as documented
    num_positional: int
    keywords: Collection[str] | None = ()  # None: some, with names that are known only later
    advice: str = ""  # the fix, if it is not obvious
    certain: Collection[str] = ()  # names that are always passed, if `keywords` is None

    def require(self, signature: inspect.Signature | None, what: str) -> None:
        """ValueError unless a function of this signature, named `what`, can be called like that. An
        unknown signature (None) passes."""
        fault = None if signature is None else self._fault(signature)
        if fault is not None:
            advice = f"; {self.advice}" if self.advice else ""
            raise ValueError(f"{what}{signature} cannot be called as {self.text}: {fault}{advice}")

    def _fault(self, signature: inspect.Signature) -> str | None:
        if self.keywords is None:
            return self._fault_of_open_call(signature)
        try:
            signature.bind(*[None] * self.num_positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return str(error)
        return None

    def _fault_of_open_call(self, signature: inspect.Signature) -> str | None:
        parameters = signature.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(takes) < self.num_positional and inspect.Parameter.VAR_POSITIONAL not in kinds:
            return f"it takes {len(takes)} arguments by position, not {self.num_positional}"
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return None
        rest = [*takes[self.num_positional :], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
        if not rest:
            return "it takes no keywords"
        refused = sorted({*self.certain} - {p.name for p in rest})
        return f"it does not take the keyword {refused[0]!r}" if refused else None


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """None if Python cannot tell, as for C functions."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None
