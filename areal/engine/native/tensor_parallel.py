"""Tensor parallelism: several ranks act as one engine.

    with leading_engine(2, on_end=report_and_exit, model_path=path, threads=1) as engine:
        loop = EngineLoop(engine)           # this process is rank 0

Every rank has a NativeEngine over its shard of the model, with the same scheduler, pages and seeds.
Logits have the same bits on all ranks, so the same calls draw the same tokens and lead to the same
next step: only the calls are sent. `LeadingEngine` (rank 0) has the interface of a NativeEngine;
`follow` repeats its calls on the other ranks. They are JSON in a broadcast over `orders`, a gloo
group: additions and aborts are sent with the step that follows, so a step costs one message. Each
message has a checksum of what the leader has finished. A follower with another one raises: its
steps would diverge and deadlock. Grammars are compiled by every rank, in the order of its calls
(also by rank 0, once more): so even the limits of a grammar are reached in the same step.

Ranks 1, 2, ... are child processes on this machine. They rendezvous through a file in a folder only
this user can read, and communicate over the loopback interface. If one ends early, the others hang
in its collectives: `on_end` is called with which one and how, and must end the process. All ranks
end with this process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic_core import from_json, to_json

from areal.api.scratch import ScratchFolder
from areal.engine.native.adapters import AdapterBank
from areal.engine.native.engine import NativeEngine, device_parts
from areal.engine.native.scoring import ScoredTokens
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.tokenizer import ModelText
from areal.engine.native.wire import Refusal, decode_requests, encode_requests
from areal.engine.stored_weights import joined_checksums
from areal.models import decoder_args
from areal.models.common.args import share_of
from areal.models.common.tensor_parallel import Ranks
from areal.models.hf_io import dtype_named, read_hf_config
from areal.utils import stacks
from areal.utils.child_process import ChildProcess
from areal.weight_sync.bucket import Checksums, read_bucket
from areal.weight_sync.publication import Publication

_FIRST_BYTES = 1024  # of a message, its length included; most need no second broadcast
_LENGTH_BYTES = 8
_NO_ADAPTERS = (
    "an engine of several ranks takes whole weights alone: send them with adapters merged"
)


class LeadingEngine:
    """The NativeEngine methods that EngineLoop calls, executed on all ranks.

    `load_weights` takes a publication; every rank maps its files and copies its shard.
    """

    loads_files = True

    def __init__(self, engine: NativeEngine, orders: dist.ProcessGroup, text: ModelText) -> None:
        self._engine = engine
        self.device = engine.device  # of this rank
        self._group = orders
        self._text = text
        self._orders: list[dict[str, Any]] = []  # since the last message
        self._tally = _Tally()
        self._is_whole = True

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def offloaded(self) -> frozenset[str]:
        return self._engine.offloaded

    def stats(self) -> dict[str, float]:
        return self._engine.stats()

    def add(self, request: GenRequest) -> None:
        content = encode_requests([request])
        decoded = decode_requests(content)[0]
        if isinstance(decoded, Refusal):
            raise ValueError(decoded.message)
        self._engine.add(self._text.prepare(decoded))
        self._orders.append({"do": "add", "content": content.decode()})

    def abort(self, rid: str) -> Finished | None:
        finished = self._engine.abort(rid)
        self._orders.append({"do": "abort", "rid": rid})
        return finished

    def step(self) -> list[Finished | Progress]:
        self._send({"do": "step"})
        self._is_whole = False  # if the step fails, the followers hang inside it
        results = self._engine.step()
        self._is_whole = True
        self._tally.add(results)
        return results

    def load_weights(self, publication: Publication, version: int, *, recompute_kv: bool) -> None:
        if not isinstance(publication, Publication):
            raise ValueError(
                "an engine of several ranks takes weights that all of them can read: set "
                "actor.weight_update_mode to shm or disk"
            )
        files = [str(publication.folder / b.file) for b in publication.manifest.buckets]
        order = {"do": "load", "files": files, "version": version, "recompute_kv": recompute_kv}
        self._send(order)
        try:
            self._engine.load_weights(publication, version, recompute_kv=recompute_kv)
        finally:
            dist.barrier(self._group)  # after it, no rank reads the files any more

    @property
    def adapters(self) -> AdapterBank:
        """Empty: see `load_adapter`."""
        return self._engine.adapters

    def load_adapter(self, *args: Any, **options: Any) -> None:
        raise ValueError(_NO_ADAPTERS)

    def add_adapter(self, name: str, folder: Path) -> None:
        raise ValueError(_NO_ADAPTERS)

    def remove_adapter(self, name: str) -> None:
        self._engine.remove_adapter(name)

    def score(self, sequences: list[list[int]], num_top: int = 0) -> list[ScoredTokens]:
        self._engine.check_score(sequences)  # raises before it is sent to the followers
        self._send({"do": "score", "sequences": sequences, "num_top": num_top})
        return self._engine.score(sequences, num_top)

    def weight_checksums(self) -> Checksums:
        self._engine.check_score([[0]])  # raises before it is sent to the followers
        self._send({"do": "checksums"})
        return joined_checksums(self._engine.model)

    def offload(self, tags: Iterable[str] | None = None) -> None:
        self._send_tags("offload", tags)
        self._engine.offload(tags)

    def onload(self, tags: Iterable[str] | None = None) -> None:
        self._send_tags("onload", tags)
        self._engine.onload(tags)

    def _send_tags(self, what: str, tags: Iterable[str] | None) -> None:
        device_parts(tags)  # validated before it is sent to the followers
        self._send({"do": what, "tags": None if tags is None else list(tags)})

    def close(self) -> None:
        """Makes `follow` return on the followers, unless a failed step has left them hanging."""
        if self._is_whole:
            self._send({"do": "close"})

    def _send(self, order: dict[str, Any]) -> None:
        orders, self._orders = [*self._orders, order], []
        _broadcast(to_json({"finished": self._tally.checksum, "orders": orders}), self._group)


def follow(engine: NativeEngine, orders: dist.ProcessGroup, text: ModelText) -> None:
    """Executes the leader's calls; `text` is for stop strings and grammars."""
    tally = _Tally()
    while True:
        message = from_json(_receive(orders))
        if message["finished"] != tally.checksum:
            raise RuntimeError(
                f"rank {dist.get_rank(orders)} has drawn other tokens than rank 0: the ranks must "
                "run the same version of areal and torch on the same kind of device"
            )
        for order in message["orders"]:
            match order["do"]:
                case "add":
                    (request,) = decode_requests(order["content"].encode())
                    assert isinstance(request, GenRequest), request  # as the leader decoded it
                    engine.add(text.prepare(request))
                case "abort":
                    engine.abort(order["rid"])
                case "step":
                    tally.add(engine.step())
                case "load":
                    _load(engine, order, orders)
                case "score":
                    engine.score(order["sequences"], order["num_top"])
                case "checksums":
                    joined_checksums(engine.model)
                case "offload":
                    engine.offload(order["tags"])
                case "onload":
                    engine.onload(order["tags"])
                case "close":
                    return


class _Tally:
    """A checksum of all finished results: equal on ranks that drew the same tokens."""

    def __init__(self) -> None:
        self.checksum = 0

    def add(self, results: Iterable[Finished | Progress]) -> None:
        for one in results:
            if isinstance(one, Finished):
                content = to_json([one.rid, one.output_tokens])
                self.checksum = zlib.crc32(content, self.checksum)


def _load(engine: NativeEngine, order: dict[str, Any], group: dist.ProcessGroup) -> None:
    weights = itertools.chain.from_iterable(read_bucket(Path(file)) for file in order["files"])
    # Weights that do not fit: the leader raises it, and all ranks keep the old ones.
    with suppress(ValueError):
        engine.load_weights(weights, order["version"], recompute_kv=order["recompute_kv"])
    dist.barrier(group)


def _broadcast(content: bytes, group: dist.ProcessGroup) -> None:
    message = len(content).to_bytes(_LENGTH_BYTES, "little") + content
    first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    first[: len(message)] = _bytes_tensor(message[:_FIRST_BYTES])
    dist.broadcast(first, group=group, group_src=0)
    if len(message) > _FIRST_BYTES:
        dist.broadcast(_bytes_tensor(message[_FIRST_BYTES:]), group=group, group_src=0)


def _receive(group: dist.ProcessGroup) -> bytes:
    first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
    dist.broadcast(first, group=group, group_src=0)
    received = first.numpy().tobytes()
    end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "little")
    if end > _FIRST_BYTES:
        rest = torch.empty(end - _FIRST_BYTES, dtype=torch.uint8)
        dist.broadcast(rest, group=group, group_src=0)
        received += rest.numpy().tobytes()
    return received[_LENGTH_BYTES:end]


def _bytes_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


_COMPUTE_TIMEOUT = timedelta(minutes=10)  # a rank may be that late, by loading weights
_ORDER_TIMEOUT = timedelta(days=3650)  # idle followers wait; a dead leader closes the connection
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
_POLL_S = 0.1
# Before `on_end`: lets an error of this rank (the same bad weights) surface first, and pending
# requests get their refusals.
_GRACE_S = 1.0


@contextmanager
def leading_engine(
    num_ranks: int, *, on_end: Callable[[str], None], **options: Any
) -> Iterator[LeadingEngine]:
    """`options`: `model_path`, `device`, `threads`, `dtype` by name, and those of
    `NativeEngine.from_pretrained`, all of them JSON.

    ValueError if the model or the device does not support this many ranks.
    """
    check_can_share(num_ranks, options["model_path"], options["device"])
    scratch = ScratchFolder("ranks")
    followers = _Followers(num_ranks, scratch, options, on_end)
    try:
        with _joined(_Place(0, num_ranks, str(scratch.path)), options) as (engine, orders):
            text = ModelText(options["model_path"], compile_timeout_s=None)
            leader = LeadingEngine(engine, orders, text)
            yield leader
            leader.close()
    finally:
        followers.close()


def check_can_share(num_ranks: int, model_path: str, device: str) -> None:
    share_of(decoder_args(read_hf_config(model_path)), num_ranks)
    first = torch.device(device)
    if first.type == "cuda" and (first.index or 0) + num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"tensor parallelism over {num_ranks} ranks needs as many devices from {device} on, "
            f"this machine has {torch.cuda.device_count()}"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Rank, number of ranks, and the rendezvous folder."""

    rank: int
    num_ranks: int
    folder: str

    def device(self, first: str) -> str:
        """Ranks take consecutive devices, starting at `first`."""
        device = torch.device(first)
        return first if device.type == "cpu" else f"{device.type}:{(device.index or 0) + self.rank}"


@contextmanager
def _joined(
    place: _Place, options: dict[str, Any]
) -> Iterator[tuple[NativeEngine, dist.ProcessGroup]]:
    """The engine of one rank, and the group for orders. All ranks call."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _LOOPBACK)
    options = dict(options)
    torch.set_num_threads(options.pop("threads"))
    device = options["device"] = place.device(options["device"])
    dtype = options.pop("dtype")
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    file = str(Path(place.folder) / "rendezvous")
    store = dist.FileStore(file, place.num_ranks)  # pyright: ignore[reportPrivateImportUsage]  # documented there
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=_COMPUTE_TIMEOUT,
    )
    try:
        world = dist.group.WORLD
        assert world is not None, "it was just initialized"
        orders = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_ORDER_TIMEOUT))
        engine = NativeEngine.from_pretrained(
            options.pop("model_path"),
            dtype=dtype_named(dtype),
            ranks=Ranks.of(world),
            **options,
        )
        yield engine, orders
    finally:
        dist.destroy_process_group()


class _Followers:
    """Starts, watches and ends ranks 1, 2, ..."""

    def __init__(
        self,
        num_ranks: int,
        scratch: ScratchFolder,
        options: dict[str, Any],
        on_end: Callable[[str], None],
    ) -> None:
        self._scratch = scratch
        self._on_end = on_end
        self._closing = threading.Event()
        self._children = [
            self._start(_Place(rank, num_ranks, str(scratch.path)), options)
            for rank in range(1, num_ranks)
        ]
        self._watcher = threading.Thread(target=self._watch, name="rank-watcher", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Ends them all; after `LeadingEngine.close` they are already exiting."""
        self._closing.set()
        self._watcher.join()
        self._end()

    @staticmethod
    def _start(place: _Place, options: dict[str, Any]) -> ChildProcess:
        content = {"rank": place.rank, "num_ranks": place.num_ranks, "folder": place.folder}
        argv = [sys.executable, "-m", __name__, json.dumps({"place": content, "options": options})]
        return ChildProcess(argv, name=f"rank {place.rank} of the native engine")

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            ended = [child for child in self._children if child.poll() is not None]
            if ended and not self._closing.wait(_GRACE_S):
                fault = ended[0].describe_end()
                self._end()
                self._on_end(fault)
                return

    def _end(self) -> None:
        for child in self._children:
            child.terminate()
        self._scratch.close()


def run_follower(place: _Place, options: dict[str, Any]) -> None:
    """Entry point of ranks 1, 2, ...; returns when the leader closes."""
    with _joined(place, options) as (engine, orders):
        follow(engine, orders, ModelText(options["model_path"], compile_timeout_s=None))


if __name__ == "__main__":
    stacks.listen()
    given = json.loads(sys.argv[1])
    run_follower(_Place(**given["place"]), given["options"])
