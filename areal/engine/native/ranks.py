"""The processes of one tensor parallel engine: how they start, meet and end.

    with leading_engine(2, on_end=report_and_exit, model_path=path, threads=1) as engine:
        loop = EngineLoop(engine)           # this process is rank 0

Ranks 1, 2, ... are child processes, all on this machine. They meet through a file in a folder only
this user can read, and talk over the loopback interface. One that ends early leaves the others
waiting for its part of a sum, so nothing can go on: `on_end` is told which one and how, and must
end the process. The ranks end with this one, however it ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from areal.api.scratch import ScratchFolder
from areal.engine.native.engine import NativeEngine
from areal.engine.native.tensor_parallel import LeadingEngine, follow
from areal.engine.native.tokenizer import ModelText
from areal.models import decoder_args
from areal.models.common.args import share_of
from areal.models.common.tensor_parallel import Ranks
from areal.models.hf_io import read_hf_config
from areal.utils import stacks
from areal.utils.child_process import ChildProcess

_COMPUTE_TIMEOUT = timedelta(minutes=10)  # a rank may be that late, by loading weights
_ORDER_TIMEOUT = timedelta(days=3650)  # followers of an idle server wait; a death closes the line
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
_POLL_S = 0.1
# Before `on_end`: an error of our own (the same bad weights) says more, and those who wait for
# requests hear that the engine has ended.
_GRACE_S = 1.0


@contextmanager
def leading_engine(
    num_ranks: int, *, on_end: Callable[[str], None], **options: Any
) -> Iterator[LeadingEngine]:
    """`options`: `model_path`, `device`, `threads`, `dtype` by name, and those of
    `NativeEngine.from_pretrained`, all of them JSON.

    ValueError when the model or the device cannot be shared by so many.
    """
    check_can_share(num_ranks, options["model_path"], options["device"])
    scratch = ScratchFolder("ranks")
    followers = _Followers(num_ranks, scratch, options, on_end)
    try:
        with _joined(_Place(0, num_ranks, str(scratch.path)), options) as (engine, orders):
            leader = LeadingEngine(engine, orders)
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
    """Which rank of how many, and the folder where they meet."""

    rank: int
    num_ranks: int
    folder: str

    def device(self, first: str) -> str:
        """Ranks take consecutive devices, from the one that was asked for."""
        device = torch.device(first)
        return first if device.type == "cpu" else f"{device.type}:{(device.index or 0) + self.rank}"


@contextmanager
def _joined(
    place: _Place, options: dict[str, Any]
) -> Iterator[tuple[NativeEngine, dist.ProcessGroup]]:
    """The engine of one rank, and the group that orders travel in. All ranks call it."""
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
            dtype=getattr(torch, dtype) if dtype else None,
            ranks=Ranks.of(world),
            **options,
        )
        yield engine, orders
    finally:
        dist.destroy_process_group()


class _Followers:
    """Ranks 1, 2, ...: started, watched, ended."""

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
        """Ends them all; those that were told to close are on their way already."""
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
    """The life of rank 1, 2, ...: until the leader closes."""
    with _joined(place, options) as (engine, orders):
        follow(engine, orders, ModelText(options["model_path"]))


if __name__ == "__main__":
    stacks.listen()
    given = json.loads(sys.argv[1])
    run_follower(_Place(**given["place"]), given["options"])
