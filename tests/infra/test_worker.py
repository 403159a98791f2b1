"""Messages between a process and its child: they arrive as sent, or it is known why not."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial
from typing import Any

import pytest
import torch

from areal.algorithm.loss import sft_loss
from areal.api.scheduler_api import EngineCallError, Job
from areal.infra.scheduler.local import LocalScheduler
from areal.infra.worker import pack, unpack
from areal.utils.channel import Channel


@pytest.fixture
def ends():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def over(ends, message):
    """Sent by another thread: a large message does not fit in the socket's buffer."""
    sender = threading.Thread(target=ends[0].send, args=pack(message))
    sender.start()
    received = unpack(ends[1].receive(timeout_s=20))
    sender.join()
    return received


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.randn(300, 1000),
        torch.randn(4, 4, dtype=torch.bfloat16).T,
        torch.tensor([[True, False]]),
        torch.zeros(0, 7),
        torch.tensor(2.5, requires_grad=True),
    ],
    ids=["int", "large", "bfloat16", "bool", "empty", "scalar"],
)
def test_tensors_keep_dtype_shape_and_bits(ends, tensor):
    got = over(ends, {"x": [tensor]})["x"][0]
    assert got.dtype is tensor.dtype and torch.equal(got, tensor.detach())
    got += 1 if got.dtype is not torch.bool else True  # what arrives belongs to the receiver


def test_losses_travel_as_what_they_are(ends):
    loss = over(ends, partial(sft_loss, loss_mask=torch.ones(2, dtype=torch.bool)))
    assert loss.func is sft_loss and loss.keywords["loss_mask"].all()


def test_a_result_that_cannot_be_sent_is_an_error_of_its_call(tmp_path):
    """Other calls of the worker go on, and nobody waits for ever."""
    scheduler = LocalScheduler(tmp_path, gpus=[])
    try:
        scheduler.create_workers(Job("toy", 1, overlapping=True))
        (worker,) = scheduler.get_workers("toy", 60)
        scheduler.create_engine(worker.id, "infra.toy_engine.AsyncToy", "toy", timeout_s=900)

        async def calls() -> list[Any]:
            asked = [
                scheduler.acall_engine(worker.id, "give", "toy", what, timeout_s=900)
                for what in ("a function", "text")
            ]
            return await asyncio.gather(*asked, return_exceptions=True)

        failed, answered = asyncio.run(calls())
        assert isinstance(failed, EngineCallError) and "pickle" in str(failed).lower()
        assert answered == "text"
    finally:
        scheduler.delete_workers()
