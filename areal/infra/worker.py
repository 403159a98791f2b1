"""The engines of one worker process, by name: built from an import path, called by message.

An engine's exception is returned as an answer, so that the process survives and the caller can
raise it. Every scheduler's worker wraps an `EngineHost`.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.scheduler_api import EngineCallError, EngineCreationError
from areal.utils.import_path import load


@dataclass(slots=True)
class Answer:
    """The result of a call, or its exception with traceback and time."""

    result: Any = None
    error: Exception | None = None
    traceback: str = ""
    failed_at: float = 0.0  # seconds since the epoch

    def raise_if_not_created(self, worker_id: str) -> None:
        if self.error is not None:
            raise EngineCreationError(worker_id, self.traceback) from self.error

    def result_or_raise(self, worker_id: str) -> Any:
        if self.error is not None:
            raise EngineCallError(worker_id, self.traceback, self.failed_at) from self.error
        return self.result


class EngineHost:
    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}

    def create(
        self, path: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Answer:
        def build() -> None:
            self._engines[name] = load(path, key=name)(*args, **kwargs)

        return _answer(build)

    def call(
        self, method: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Answer:
        return _answer(lambda: getattr(self._engines[name], method)(*args, **kwargs))


def _answer(act: Callable[[], Any]) -> Answer:
    try:
        return Answer(act())
    except Exception as error:  # the caller raises it
        failed_at = time.time()
        return Answer(
            error=_travelling(error), traceback=traceback.format_exc(), failed_at=failed_at
        )


def _travelling(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # custom pickling may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
