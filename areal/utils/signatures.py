"""Can a user's function be called as we will call it? Said before it is called.

    Call("fn(inputs, **kwargs)", 1, {"floor"}).require(signature, "policy_loss: m.f")
    # ValueError: policy_loss: m.f(inputs) cannot be called as fn(inputs, **kwargs): got an unex...

`areal check` asks with a signature read from the source (`cli/static_import.py`), whoever loads the
function with the real one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """How a function is called."""

    text: str  # as documented
    num_positional: int
    keywords: Collection[str] | None = ()  # None: some, whose names are known only later
    advice: str = ""  # what to change, when that is not plain
    certain: Collection[str] = ()  # names that come in any case, where `keywords` is None

    def require(self, signature: inspect.Signature | None, what: str) -> None:
        """ValueError unless a function of this signature, called `what`, can be called so. A
        signature that is not known (None) may be anything."""
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
    """None for what Python cannot tell about, such as functions in C."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None
