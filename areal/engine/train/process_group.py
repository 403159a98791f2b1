"""Joining the other ranks, and collective decisions among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from areal.utils.device import best_device

T = TypeVar("T")

_RENDEZVOUS = "AREAL_RENDEZVOUS"  # a URL of torch.distributed
_LISTENER = "AREAL_RENDEZVOUS_FD"  # of rank 0: the socket that listens at a tcp:// rendezvous
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_ranks() -> torch.device:
    """The device of this rank. Initialises torch.distributed from the environment, unless already
    done: areal's schedulers set AREAL_RENDEZVOUS, launchers like torchrun address and port."""
    device = torch.device(best_device())
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = _backend(device)
    if not dist.is_initialized() and _RENDEZVOUS in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = _meeting(os.environ[_RENDEZVOUS], world_size)
        dist.init_process_group(backend, rank=rank, world_size=world_size, **meeting)
    if not dist.is_initialized():
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise RuntimeError(
                f"a layout of several ranks needs the environment variables {', '.join(missing)}: "
                "start the ranks with a launcher (torchrun), or initialise torch.distributed first"
            )
        dist.init_process_group(backend)
    return device


def _meeting(url: str, world_size: int) -> dict[str, Any]:
    """Where the ranks meet, as arguments of `init_process_group`."""
    place = urlsplit(url)
    if place.scheme != "tcp":
        return {"init_method": url}
    # Of the URL alone torch would open the port here, and another program may have taken it by now.
    listener = os.environ.pop(_LISTENER, None)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented there
        cast(str, place.hostname),
        cast(int, place.port),
        world_size,
        is_master=listener is not None,
        timeout=default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else int(listener),
    )
    return {"store": store}


def join_alone(device: torch.device) -> None:
    """Create a world of size 1 unless a group exists, for libraries that need one.

    It stays until the process ends, since other engines in it use it too.
    """
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented there
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    # gloo also with a GPU: offloaded tensors are reduced on the CPU.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def any_rank(here: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `here` is true on at least one rank; all of the group call."""
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def on_first_rank(ranks: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """Run `act` on the first rank; its result is returned, or its error raised, on all ranks.

    `ranks` is None for a single process.
    """
    if ranks is None:
        return act()
    outcome: list[Any] = [None, None]
    failure: OSError | None = None
    if ranks.rank() == 0:
        try:
            outcome[0] = act()
        except OSError as error:
            failure, outcome[1] = error, str(error)
    dist.broadcast_object_list(outcome, group=ranks, group_src=0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise RuntimeError(f"rank 0 failed: {outcome[1]}")
    return outcome[0]


def on_all_ranks(ranks: dist.ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Results of `act` on each rank, in rank order; an error of any rank is raised on all."""
    if ranks is None:
        return [act()]
    outcome: tuple[Any, Exception | None]
    try:
        outcome = (act(), None)
    except (OSError, RuntimeError, ValueError) as error:
        outcome = (None, error)
    outcomes: list[Any] = [None] * ranks.size()
    dist.all_gather_object(outcomes, outcome, group=ranks)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def side_group(ranks: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A second group of the same ranks, on the CPU: for threads that run beside training.

    All ranks call.
    """
    if ranks is None:
        return None
    group = dist.new_group(dist.get_process_group_ranks(ranks), backend="gloo")
    return cast(dist.ProcessGroup, group)  # of which this rank is a member
