"""WeightGroup over real sockets; members are threads here, processes in test_weight_senders.py."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from areal.weight_sync.collective import GroupError, GroupPlace, WeightGroup

WEIGHTS = {
    "a": torch.randn(400, 100, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "b": torch.arange(7, dtype=torch.int64),
    "empty": torch.zeros(0, 3),
    "odd": torch.arange(5, dtype=torch.uint8),
    "t": torch.arange(6.0).view(2, 3).T,
}


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def open_groups(pool, num_receivers: int, timeout_s: float = 20.0) -> list[WeightGroup]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def place(rank):
        return GroupPlace("g", "127.0.0.1", port, rank, 1 + num_receivers, "gloo", timeout_s)

    others = [pool.submit(WeightGroup.open, place(r), "cpu") for r in range(1, 1 + num_receivers)]
    first = WeightGroup.open(place(0), "cpu", listener=listener)
    return [first, *(other.result() for other in others)]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_all_receive_the_same_bits_version_after_version(pool, bucket_bytes):
    sender, *receivers = open_groups(pool, 2)
    for version in (1, 2):
        weights = {name: tensor + version for name, tensor in WEIGHTS.items()}
        under_way = [pool.submit(group.receive, version) for group in receivers]
        sender.send(version, weights.items(), bucket_bytes=bucket_bytes)
        for future in under_way:
            staged = dict(future.result())
            assert list(staged) == list(weights)
            for name, tensor in weights.items():
                assert staged[name].dtype == tensor.dtype and torch.equal(staged[name], tensor)
    for group in (sender, *receivers):
        group.close()


def test_the_next_bucket_is_gathered_while_one_travels(pool):
    sender, receiver = open_groups(pool, 1)
    gathering_third = threading.Event()

    def gather():
        yield "first", torch.ones(1 << 20)
        yield "second", torch.ones(1)
        gathering_third.set()
        yield "third", torch.ones(1)

    def receive_first_late() -> bool:
        header = receiver._receive_header()
        in_time = gathering_third.wait(10)
        flat = torch.empty(header["nbytes"], dtype=torch.uint8)
        receiver._finish(receiver._broadcast(flat, receiver._buckets))
        return in_time

    sending = pool.submit(sender.send, 1, gather(), bucket_bytes=1)
    assert receive_first_late(), "the sender waited for the first bucket before it gathered on"
    with pytest.raises(GroupError, match="2 buckets came of 3"):
        receiver.receive(1)
    sending.result()


def test_a_version_nobody_expects_is_refused(pool):
    sender, receiver = open_groups(pool, 1)
    sending = pool.submit(sender.send, 5, [("a", torch.ones(2))], bucket_bytes=100)
    with pytest.raises(GroupError, match="sends version 5, this server was told to expect 4"):
        receiver.receive(4)
    receiver.close()
    with pytest.raises(GroupError, match="the weight group broke"):
        sending.result()


def test_a_wrong_checksum_is_named(pool):
    sender, receiver = open_groups(pool, 1)
    under_way = pool.submit(receiver.receive, 1)
    flat = torch.zeros(16, dtype=torch.uint8)
    weights = [["a", "F32", [4], 0]]
    header = {"version": 1, "weights": weights, "checksum": 1, "nbytes": 16}
    sender._send_header(header)
    sender._finish(sender._broadcast(flat, sender._buckets))
    with pytest.raises(GroupError, match=r"bucket 0 of version 1 \(a ...\) is not what was sent"):
        under_way.result()


def test_a_member_that_hangs_costs_the_deadline_and_one_that_leaves_nothing(pool):
    sender, hangs = open_groups(pool, 1, timeout_s=1.0)
    start = time.monotonic()
    with pytest.raises(GroupError, match="did not answer within 1 s"):
        sender.send(1, [("large", torch.ones(1 << 24))], bucket_bytes=1)
    assert 1 <= time.monotonic() - start < 25
    sender.close()
    hangs.close()

    sender, receiver = open_groups(pool, 1, timeout_s=30.0)
    under_way = pool.submit(receiver.receive, 1)
    start = time.monotonic()
    sender.close()
    with pytest.raises(GroupError, match="the weight group broke"):
        under_way.result()
    assert time.monotonic() - start < 20


def test_what_the_check_raises_ends_the_wait(pool):
    sender, _ = open_groups(pool, 1, timeout_s=2.0)

    def check():
        raise KeyError("a server said no")

    with pytest.raises(KeyError, match="said no"):
        sender.send(1, [("large", torch.ones(1 << 24))], bucket_bytes=1, check=check)


def test_a_group_that_is_not_complete_in_time(pool):
    listener = socket.create_server(("127.0.0.1", 0))
    place = GroupPlace("g", "127.0.0.1", listener.getsockname()[1], 0, 2, "gloo", 1.0)
    with pytest.raises(GroupError, match=r"the weight group of 127.0.0.1:\d+: .*timeout"):
        WeightGroup.open(place, "cpu", listener=listener)


@pytest.mark.gpu
def test_nccl_carries_what_is_sent():
    """A group of one: NCCL wants a GPU per member. Two GPUs, when they are there, are two."""
    num_members = min(2, torch.cuda.device_count())
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def open_group(rank, listener=None):
        place = GroupPlace("g", "127.0.0.1", port, rank, num_members, "nccl", 60.0)
        return WeightGroup.open(place, f"cuda:{rank}", listener=listener)

    weights = {name: tensor.cuda() for name, tensor in WEIGHTS.items()}
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(open_group, rank) for rank in range(1, num_members)]
        sender = open_group(0, listener)
        receivers = [other.result() for other in others]
        for version in (1, 2):
            under_way = [pool.submit(group.receive, version) for group in receivers]
            sender.send(version, weights.items(), bucket_bytes=100)
            for future in under_way:
                for name, tensor in future.result():
                    assert tensor.is_cuda and torch.equal(tensor.cpu(), WEIGHTS[name])
    for group in (sender, *receivers):
        group.close()
