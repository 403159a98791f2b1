"""Storage of sharded checkpoints: raw tensor bytes and a JSON index, written and read by all ranks.

    {folder}/index.json      by tensor: dtype, size, and its chunks (offsets, sizes, file, position)
    {folder}/rank{R}.bin     the chunks that rank R wrote, one after another, as they lie in memory

torch's planners decide which rank writes and reads what (`torch.distributed.checkpoint`). torch's
own storage unpickles the index and each tensor, which can run arbitrary code. Here nothing is
unpickled: the index is checked entry by entry and can name only tensors, so no planner unpickles an
object either.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from areal.utils.manifest import DamagedError

INDEX = "index.json"
_FORMAT = 1
_SHARD_NAME = re.compile(r"rank\d{1,9}\.bin")


@dataclass(frozen=True, slots=True)
class Place:
    """Location of the bytes of one chunk."""

    file: str
    at: int  # byte offset
    sizes: tuple[int, ...]
    dtype: torch.dtype


class ShardWriter(StorageWriter):
    """Writes one rank's part of `folder`, which exists."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with (self._folder / plan.storage_data).open("wb") as file:
            for item in plan.items:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor), f"{item.index.fqn} is no tensor"
                tensor = data.detach().cpu().contiguous()
                place = Place(plan.storage_data, file.tell(), tuple(tensor.shape), tensor.dtype)
                file.write(_raw(tensor))
                results.append(WriteResult(item.index, tensor.nbytes, place))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, with the results of all ranks."""
        tensors = {
            name: {"dtype": _name(entry.properties.dtype), "size": list(entry.size), "chunks": []}
            for name, entry in stored_tensors(metadata).items()
        }
        for result in (result for of_rank in results for result in of_rank):
            place: Place = result.storage_data
            offsets = result.index.offset or (0,) * len(place.sizes)
            chunk = {"offsets": list(offsets), "sizes": list(place.sizes)}
            chunk |= {"file": place.file, "at": place.at}
            tensors[result.index.fqn]["chunks"].append(chunk)
        text = json.dumps({"format": _FORMAT, "tensors": tensors})
        (self._folder / INDEX).write_text(text, encoding="utf-8")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank{rank}.bin") for rank, plan in enumerate(plans)]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class ShardReader(StorageReader):
    """Reads one rank's part of `folder`. DamagedError if the index does not match the files."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._places: dict[MetadataIndex, Place] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return _parse((self._folder / INDEX).read_bytes(), self._folder)
        except FileNotFoundError:
            fault = "missing; an index pickled by torch or by an older areal is not read"
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            fault = f"malformed ({type(error).__name__}: {error})"
        raise DamagedError(str(self._folder), INDEX, fault)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Place, ReadItem]]] = {}
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR, f"{item.storage_index.fqn} is no tensor"
            place = self._places[item.storage_index]
            by_file.setdefault(place.file, []).append((place, item))
        for name, items in by_file.items():
            with (self._folder / name).open("rb") as file:
                for place, item in sorted(items, key=lambda pair: pair[0].at):
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(self._read(file, place), item))
                    planner.commit_tensor(item, target)
        return _done(None)

    def _read(self, file: BufferedReader, place: Place) -> torch.Tensor:
        chunk = torch.empty(place.sizes, dtype=place.dtype)
        file.seek(place.at)
        if file.readinto(_raw(chunk)) != chunk.nbytes:
            raise DamagedError(str(self._folder), place.file, "too short for its index")
        return chunk

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """By name; the index holds only tensors."""
    entries = metadata.state_dict_metadata.items()
    tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
    assert len(tensors) == len(entries), "a checkpoint holds tensors alone"
    return tensors


def _part(chunk: torch.Tensor, item: ReadItem) -> torch.Tensor:
    """The part of a stored chunk that this rank needs; its layout may differ from the writer's."""
    for axis, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(axis, offset, length)
    return chunk


def _parse(text: bytes, folder: Path) -> Metadata:
    """The index in the form of torch's planners; each chunk must lie in its tensor and file."""
    index = json.loads(text)
    if index["format"] != _FORMAT:
        raise ValueError(f"format {index['format']!r}, expected {_FORMAT}")
    tensors: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, Place] = {}
    file_sizes: dict[str, int] = {}
    for name, entry in index["tensors"].items():
        size, dtype = _ints(entry["size"]), _dtype(entry["dtype"])
        chunks = []
        for chunk in entry["chunks"]:
            offsets, sizes = _ints(chunk["offsets"]), _ints(chunk["sizes"])
            ends = [offset + length for offset, length in zip(offsets, sizes, strict=True)]
            if any(end > whole for end, whole in zip(ends, size, strict=True)):
                raise ValueError(f"a chunk of {name} lies outside of it")
            (at,) = _ints([chunk["at"]])
            place = Place(chunk["file"], at, sizes, dtype)
            _check_file(place, folder, file_sizes)
            places[MetadataIndex(name, offsets)] = place
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise ValueError(f"the chunks of {name} do not make up its size {list(size)}")
        properties = TensorProperties(dtype=dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size(size), chunks)
    return Metadata(tensors, storage_data=places)


def _check_file(place: Place, folder: Path, file_sizes: dict[str, int]) -> None:
    if not _SHARD_NAME.fullmatch(place.file):
        raise ValueError(f"{place.file!r} is no name of a shard")
    if place.file not in file_sizes:
        file = folder / place.file
        file_sizes[place.file] = file.stat().st_size if file.is_file() else 0
    end = place.at + math.prod(place.sizes) * place.dtype.itemsize
    if end > file_sizes[place.file]:
        raise ValueError(f"a chunk ends at byte {end} of {place.file}, which is shorter")


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(
        type(value) is not int or not 0 <= value < 1 << 48 for value in values
    ):
        raise ValueError(f"{values!r} is no list of counts")
    return tuple(values)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of a tensor")
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _raw(tensor: torch.Tensor) -> memoryview:
    """Its bytes, in place."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _done(result: Any) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future
