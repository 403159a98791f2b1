"""Are the machines of a Ray cluster alike, and do they reach each other?

A visitor on every machine says what is installed there and listens on a free port; this machine,
and the one before it in the list, connect to it. So another version of areal, or a firewall between
two machines, is not found in the middle of a run.
"""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from areal.infra.installation import Finding
from areal.infra.launcher.cluster import wait_for_port

_PACKAGES = ("areal", "torch", "transformers")
_CONNECT_S = 10.0
_VISIT_S = 300.0  # a worker starts on each machine


def check_cluster(address: str) -> Iterator[Finding]:
    """One finding for each machine."""
    try:
        wait_for_port(address, time.monotonic() + _CONNECT_S)
    except RuntimeError as error:
        yield Finding("cluster", str(error), "nothing else of it can be checked", True)
        return
    ray.init(address, log_to_driver=False)
    try:
        yield from _visit([node for node in ray.nodes() if node["Alive"]])
    finally:
        ray.shutdown()


def _visit(nodes: list[dict[str, Any]]) -> Iterator[Finding]:
    visitors = [_send_visitor(node["NodeID"]) for node in nodes]
    own, neighbour = Place.here(port=0), None  # of the first machine, this one alone
    for node, visitor in zip(nodes, visitors, strict=True):
        name = f"machine {node['NodeName']}"
        try:
            place: Place = _ask(visitor.look.remote())
            reached = _connect(place.ip, place.port)
            if neighbour is not None:
                reached = _ask(neighbour.connect.remote(place.ip, place.port)) or reached
        except RayError as error:
            why = str(error).strip().splitlines()[-1]
            yield Finding(name, f"no worker starts: {why}", "install areal there", True)
            continue
        neighbour = visitor
        advice = "; ".join(fault for fault in (*own.differences(place), reached) if fault)
        state = f"{place.ip}, Python {place.python}, areal {place.versions['areal']}"
        yield Finding(name, state, advice, True)


def _ask(call: Any) -> Any:
    return ray.get(call, timeout=_VISIT_S)


def _send_visitor(node_id: str) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_Visitor).options(num_cpus=0, scheduling_strategy=place).remote()


@dataclass(frozen=True, slots=True)
class Place:
    """What a machine has, and where its visitor listens."""

    ip: str
    port: int
    python: str
    versions: dict[str, str]

    @classmethod
    def here(cls, port: int) -> Place:
        versions = {name: _version(name) for name in _PACKAGES}
        return cls(ray.util.get_node_ip_address(), port, platform.python_version(), versions)

    def differences(self, other: Place) -> Iterator[str]:
        pairs = {"Python": (self.python, other.python)}
        pairs |= {name: (self.versions[name], other.versions[name]) for name in _PACKAGES}
        for name, (own, theirs) in pairs.items():
            if own != theirs:
                yield f"{name} {theirs} is there, {own} here: install the same"


class _Visitor:
    def __init__(self) -> None:
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))

    def look(self) -> Place:
        return Place.here(self._listener.getsockname()[1])

    def connect(self, ip: str, port: int) -> str:
        return _connect(ip, port)


def _connect(ip: str, port: int) -> str:
    """Empty if a connection could be opened."""
    try:
        socket.create_connection((ip, port), timeout=_CONNECT_S).close()
    except OSError as error:
        here = ray.util.get_node_ip_address()
        return f"{here} cannot connect to {ip}:{port} ({error}): open the ports between machines"
    return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
