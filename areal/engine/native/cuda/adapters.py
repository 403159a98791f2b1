"""The adapters of an engine on the device: one stack of matrices per projection.

    adapters = DeviceAdapters(bank, decoder.projections)
    adapters.sync()                               # before a launch: what the bank has now
    adapters.places_of(numbers)                   # of rows, in the stacks
    adapters.rows(place_T)                        # for a forward

An adapter keeps its place as long as the bank has it; the live one is always at LIVE, where nothing
is added while there is none. A live adapter that is published again is written over the old one, so
that captured graphs go on. They are void after stacks had to grow: more adapters, a higher rank, or
layers that none had before. `generation` counts that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from areal.engine.native.adapters import LIVE, Adapter, AdapterBank
from areal.engine.native.cuda.adapter_linear import MIN_RANK, AdapterRows, AdapterStack
from areal.engine.native.cuda.linear import Projection

_MIN_NAMED = 4  # places of named adapters, beside that of the live one


class DeviceAdapters:
    def __init__(self, bank: AdapterBank, projections: Sequence[Projection]) -> None:
        self._bank = bank
        # Where the product of a layer's weight is: projection, and part of it.
        self._sites = {
            id(linear.weight): (projection, part)
            for projection in projections
            for part, linear in enumerate(projection.linears)
        }
        self._stacks: dict[int, AdapterStack] = {}
        self._places = {LIVE: LIVE}  # by number
        self._num_places, self._rank = 1 + _MIN_NAMED, MIN_RANK
        self._held: dict[int, Adapter] = {}  # by number, as written
        self.generation = 1

    @property
    def weights(self) -> frozenset[int]:
        """Identities of those whose products can have adapters."""
        return frozenset(self._sites)

    def sync(self) -> None:
        wanted = self._bank.by_number
        if wanted == self._held:  # an adapter equals itself only
            return
        for number in self._held.keys() - wanted.keys():
            place = self._places[number] if number == LIVE else self._places.pop(number)
            self._clear(place)
        new = {n: adapter for n, adapter in wanted.items() if self._held.get(n) is not adapter}
        for number in new.keys() - self._places.keys():
            self._places[number] = min(set(range(1, len(wanted) + 2)) - {*self._places.values()})
        if self._grow(wanted.values()):
            new = wanted
        for number, adapter in new.items():
            self._write(self._places[number], adapter)
        self._held = dict(wanted)

    def are_among(self, numbers: np.ndarray) -> bool:
        """Whether one of these adapters is more than the plain model."""
        return bool(self._held) and bool(np.isin(numbers, list(self._held)).any())

    def places_of(self, numbers: np.ndarray) -> np.ndarray:
        return np.array([self._places[number] for number in numbers.tolist()], np.int32)

    def rows(self, place_T: torch.Tensor) -> AdapterRows:
        return AdapterRows.of(place_T, self._num_places, self._stacks)

    def _grow(self, adapters: Collection[Adapter]) -> bool:
        """Make room for these, in new stacks if those there are too small."""
        layers = [layer for adapter in adapters for layer in adapter.matrices]
        used = {id(self._site(layer)[0]): self._site(layer)[0] for layer in layers}
        ranks = [len(a_RD) for adapter in adapters for a_RD, _ in adapter.matrices.values()]
        rank = max([self._rank, *(1 << (rank - 1).bit_length() for rank in ranks)])
        last = max(self._places.values())
        places = max(self._num_places, 1 + (1 << (last - 1).bit_length()) if last else 0)
        if (rank, places) == (self._rank, self._num_places) and used.keys() <= self._stacks.keys():
            return False
        self._rank, self._num_places = rank, places
        self.generation += 1
        self._stacks.clear()  # frees them before the new ones are there
        for key, projection in used.items():
            weights = [linear.weight for linear in projection.linears]
            self._stacks[key] = AdapterStack.zeros(places, rank, weights)
        return True

    def _site(self, layer: str) -> tuple[Projection, int]:
        return self._sites[id(self._bank.weight_of(layer))]

    def _write(self, place: int, adapter: Adapter) -> None:
        self._clear(place)
        for layer, (a_RD, b_NR) in adapter.matrices.items():
            projection, part = self._site(layer)
            scale = adapter.scaling(layer)
            self._stacks[id(projection)].write(place, part, a_RD, b_NR, scale)

    def _clear(self, place: int) -> None:
        for stack in self._stacks.values():
            stack.scale_EP[place] = 0.0
