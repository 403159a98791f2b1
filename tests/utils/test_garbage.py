"""The collector's setting: what is loaded is left alone, cycles are still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from areal.utils.garbage import tune_gc


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    def __init__(self) -> None:
        self.me = self


def test_cycles_made_later_are_collected_without_being_asked_for():
    old = [Node() for _ in range(10)]
    tune_gc()
    assert gc.get_freeze_count() > len(old)
    lost = weakref.ref(Node())
    kept = [[] for _ in range(30_000)]  # three times the first threshold
    assert lost() is None and kept
