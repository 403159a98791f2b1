"""Addresses that a sandbox session may connect to: `sandbox.network`.

    Address.of("pypi.org:443")                a name, looked up outside at each connection
    Address.of("search=10.0.0.5:8080")        a name of our own for a fixed address
    Address.of("127.0.0.1:8931")              this machine

Who lists a name means a public host: whatever its DNS says, it never leads to this machine, to a
private network or to a link-local address, where clouds keep their credentials. A fixed address
may be private or this machine's; link-local ones are refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_ADDRESSES = 64
_NAME = re.compile(
    r"(?=.{1,253}\Z)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z]([a-z0-9-]{0,61}[a-z0-9])?\Z"
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_EXPECTED = "expected HOST:PORT, or NAME=ADDRESS:PORT with an IP address"


@dataclass(frozen=True, slots=True)
class Address:
    name: str  # what programs inside call it
    port: int
    pinned: str | None = None  # the IP address it stands for; None: what DNS says

    @classmethod
    def of(cls, entry: object) -> Address:
        """ValueError, naming the key, for an entry that cannot be meant."""
        if not isinstance(entry, str):
            raise ValueError(f"sandbox.network: {entry!r}: {_EXPECTED}")
        name, equals, target = entry.partition("=")
        host, colon, port = (target if equals else entry).rpartition(":")
        if not colon or not _is_port(port):
            raise ValueError(f"sandbox.network: {entry!r:.300} has no port; {_EXPECTED}")
        literal = _ip(host.removeprefix("[").removesuffix("]"))
        if host == "localhost" and not equals:
            literal, name = ipaddress.ip_address("127.0.0.1"), "localhost"
        elif not equals:
            name = host.lower() if literal is None else str(literal)
            if literal is not None and not (literal.version == 4 and literal.is_loopback):
                raise ValueError(
                    f"sandbox.network: {entry!r}: programs inside reach an address by a name; "
                    f"write server={entry}"
                )
        if equals and literal is None:
            raise ValueError(f"sandbox.network: {entry!r:.300}: {host!r:.100} is no IP address")
        if (literal is None or equals) and not _NAME.match(name):
            raise ValueError(
                f"sandbox.network: {entry!r:.300}: {name!r:.100} is no host name; {_EXPECTED}"
            )
        if literal is not None and is_never_meant(literal):
            raise ValueError(
                f"sandbox.network: {entry!r}: link-local, multicast and reserved addresses cannot "
                "be listed: clouds serve credentials there"
            )
        return cls(name, int(port), None if literal is None else str(literal))


def check_distinct(addresses: Iterable[Address]) -> None:
    """ValueError if programs inside could not tell two of them apart."""
    addresses, seen = list(addresses), {}
    ips = inside_ips(addresses)
    for one in addresses:
        place = (ips[one.name], one.port)
        if place in seen:
            raise ValueError(
                f"sandbox.network: {one.name}:{one.port} is listed twice, or stands for the same "
                f"address inside as {seen[place].name}:{one.port}"
            )
        seen[place] = one


def inside_ips(addresses: Iterable[Address]) -> dict[str, str]:
    """Name -> the loopback address by which programs inside reach it."""
    found: dict[str, str] = {}
    for address in addresses:
        if address.name == "localhost":
            found[address.name] = "127.0.0.1"
        elif _ip(address.name) is not None:
            found[address.name] = address.name
        else:
            found.setdefault(address.name, f"127.77.0.{len(found) + 1}")
    return found


def public(ips: Iterable[str]) -> list[str]:
    """Those that the whole internet can reach, in the form in which they were given."""
    return [text for text in ips if (ip := _ip(text)) is not None and _is_public(ip)]


def is_never_meant(ip: IPAddress) -> bool:
    ip = _inner(ip)
    cloud = ip.version == 6 and str(ip) == "fd00:ec2::254"
    reserved = ip.is_reserved and not (ip.version == 6 and ip.is_loopback)
    return ip.is_link_local or ip.is_multicast or ip.is_unspecified or reserved or cloud


def _is_public(ip: IPAddress) -> bool:
    ip = _inner(ip)
    # Tunnels lead to IPv4 addresses, which may be any.
    is_tunnel = isinstance(ip, ipaddress.IPv6Address) and (
        ip.sixtofour is not None or ip.teredo is not None or ip in _NAT64
    )
    return ip.is_global and not (is_tunnel or ip.is_multicast or ip.is_reserved)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def _inner(ip: IPAddress) -> IPAddress:
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return ip if mapped is None else mapped


def _ip(text: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
