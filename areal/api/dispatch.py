"""How a call travels to an object that lives on several ranks: marks on the methods of a contract.

    class TrainEngine(ABC):
        @split                      # each data-parallel place gets its rows of the first argument
        def train_batch(self, input_, ...): ...

        @split(merges_rows=True)    # and the rows of the answers are put back in their order
        def forward_batch(self, input_): ...

        @broadcast                  # the same call on every rank; the first rank's answer
        def save(self, meta): ...

        @head                       # the first rank alone: nothing in it may need another rank
        def get_version(self): ...

A method without a mark does not travel. Marks change nothing about the method itself, so an object
in this process is called as ever; `infra/train_controller.py` reads them for one that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

Method = TypeVar("Method", bound=Callable[..., Any])

_ATTRIBUTE = "__areal_mark__"


@dataclass(frozen=True, slots=True)
class Mark:
    kind: Literal["split", "broadcast", "head"]
    merges_rows: bool = False  # of split: the answer has the rows of the argument


@overload
def split(method: Method) -> Method: ...
@overload
def split(*, merges_rows: bool) -> Callable[[Method], Method]: ...
def split(method: Any = None, *, merges_rows: bool = False) -> Any:
    """Rows of the padded batch in the first argument are divided by their tokens. Every
    `rows_per_unit` (a keyword of the method, default 1) neighbours stay together; a place may get
    none. What is not merged must be the same on every rank."""

    def mark(marked: Method) -> Method:
        return _mark(marked, Mark("split", merges_rows))

    return mark if method is None else mark(method)


def broadcast(method: Method) -> Method:
    return _mark(method, Mark("broadcast"))


def head(method: Method) -> Method:
    return _mark(method, Mark("head"))


def marks_of(contract: type) -> dict[str, Mark]:
    """Method name -> its mark, for every marked method of the class and its bases."""
    names = {name for cls in contract.__mro__ for name in vars(cls)}
    marks = {name: getattr(getattr(contract, name), _ATTRIBUTE, None) for name in names}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _mark(method: Method, mark: Mark) -> Method:
    setattr(method, _ATTRIBUTE, mark)
    return method
