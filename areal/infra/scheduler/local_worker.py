"""The process of one worker of `LocalScheduler`: answers messages until its channel is closed."""

from __future__ import annotations

import argparse
import contextlib
import socket

import torch.distributed as dist

from areal.infra.channel import Channel
from areal.infra.worker import Answer, EngineHost
from areal.utils import stacks


def main() -> None:
    stacks.listen()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="an open socket, by its number")
    serve(Channel(socket.socket(fileno=parser.parse_args().channel)))
    if dist.is_initialized():
        dist.destroy_process_group()


def serve(channel: Channel) -> None:
    host = EngineHost()
    actions = {"create": host.create, "call": host.call, "ping": Answer}
    with contextlib.suppress(EOFError):  # the scheduler has closed the channel
        while True:
            action, *args = channel.receive()
            channel.send(actions[action](*args))


if __name__ == "__main__":
    main()
