"""`sandbox.network`: a session reaches what is listed, and nothing else whatever it tries."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from sandbox_support import needs_sandbox

from areal.sandbox.addresses import Address, inside_ips, public
from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session
from areal.sandbox.tunnels import MAX_CONNECTIONS

WAIT_S = 900.0
GET = "import urllib.request as u\nprint(u.urlopen('http://{}', timeout=60).read().decode())"
CONNECT = (
    "import socket\ns = socket.create_connection({}, timeout=5)\nprint('PWN' 'ED', s.recv(99))"
)
NETLINK = """
import socket, struct
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
body = struct.pack('BBBBi', 2, 32, 0, 0, 1) + struct.pack('HH4s', 8, 2, bytes([10, 9, 8, 7]))
s.send(struct.pack('IHHII', 16 + len(body), 20, 5, 1, 0) + body)
error = struct.unpack('i', s.recv(999)[16:20])[0]
print('PWN' 'ED' if error == 0 else error)
"""
# In two halves: a traceback shows the line.
ATTACKS = {
    "another port": CONNECT.format("('127.0.0.1', VICTIM)"),
    "another name of this machine": CONNECT.format("('localhost', VICTIM)"),
    "another port of the name": CONNECT.format("('search', VICTIM)"),
    "IPv6": CONNECT.format("('::1', VICTIM)"),
    "an IPv4 address as IPv6": CONNECT.format("('::ffff:127.0.0.1', VICTIM)"),
    "an address as a number": CONNECT.format("('2130706433', VICTIM)"),
    "the machine's own address": CONNECT.format("('HOST_IP', VICTIM)"),
    "the listed port by an address": CONNECT.format("('127.0.0.1', LISTED)"),
    "metadata of clouds": CONNECT.format("('169.254.169.254', 80)"),
    "an address of the internet": CONNECT.format("('1.1.1.1', 443)"),
    "a name of the internet": CONNECT.format("('example.com', 80)"),
    "a redirect": GET.format("search:LISTED/redirect") + "\nprint('PWN' 'ED')",
    "a redirect to metadata": GET.format("search:LISTED/metadata") + "\nprint('PWN' 'ED')",
    "a proxy request": (
        "import socket\ns = socket.create_connection(('search', LISTED))\n"
        "s.sendall(b'CONNECT 127.0.0.1:VICTIM HTTP/1.1\\r\\n\\r\\n')\n"
        "s.sendall(b'GET http://127.0.0.1:VICTIM/ HTTP/1.1\\r\\n\\r\\n')\n"
        "s.shutdown(1)\nprint(s.makefile().read())"
    ),
    "DNS": (
        "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\n"
        "s.sendto(b'x', ('8.8.8.8', 53))\nprint('PWN' 'ED')"
    ),
    "UDP to this machine": (
        "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\ns.settimeout(1)\n"
        "s.connect(('127.0.0.1', VICTIM))\ns.send(b'x')\nprint('PWN' 'ED', s.recv(9))"
    ),
    "raw packets": "import socket\nsocket.socket(2, socket.SOCK_RAW, 1)\nprint('PWN' 'ED')",
    "packets of a device": "import socket\nsocket.socket(17, 3)\nprint('PWN' 'ED')",
    "sockets of files": "import socket\nsocket.socket(socket.AF_UNIX)\nprint('PWN' 'ED')",
    "sockets of machines": "import socket\nsocket.socket(40, 1)\nprint('PWN' 'ED')",
    "taking the listed address": (
        "import socket\ns = socket.socket()\ns.setsockopt(1, 2, 1)\ns.setsockopt(1, 15, 1)\n"
        "s.bind(('127.77.0.1', LISTED))\ns.listen()\nprint('PWN' 'ED')"
    ),
    "an address for the device": NETLINK,
    "the table of names": "open('/etc/hosts', 'w').write('x')\nprint('PWN' 'ED')",
}


@asynccontextmanager
async def server(answer):
    """A host on loopback; yields (port, first lines of the requests)."""
    seen = []

    async def serve(reader, writer):
        line = (await reader.readline()).decode()
        seen.append(line)
        writer.write(answer(line).encode())
        writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1], seen


def said(text, status="200 OK", more=""):
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(text)}\r\n\r\n{text}"


@needs_sandbox
async def test_listed_addresses_are_reached_by_their_names():
    async with server(lambda line: said(f"you asked {line.split()[1]}")) as (port, _):
        listed = (f"search=127.0.0.1:{port}", f"127.0.0.1:{port}", f"localhost:{port}")
        for network in (listed[:1], listed[1:2], listed[2:]):
            limits = SessionLimits(network=network, wall_s=WAIT_S)
            name = network[0].partition("=")[0].partition(":")[0]
            async with await Session.start(limits) as session:
                result = await session.python(GET.format(f"{name}:{port}/a"))
                assert result.output == "you asked /a\n", result.text
        async with await Session.start() as session:
            refused = await session.python(GET.format(f"127.0.0.1:{port}/a"))
            assert refused.exit_code != 0 and "you asked" not in refused.output


@needs_sandbox
async def test_attacks_on_the_list_reach_nobody():
    async with server(lambda line: said("PWNED")) as (victim, robbed):

        def answer(line):
            where = {"/redirect": f"127.0.0.1:{victim}", "/metadata": "169.254.169.254"}
            path = line.split()[1]
            if path in where:
                return said("", "302 Found", f"Location: http://{where[path]}/\r\n")
            return said(f"asked {line}")

        async with server(answer) as (listed, seen):
            limits = SessionLimits(network=(f"search=127.0.0.1:{listed}",), wall_s=60, cpu_s=60)
            async with await Session.start(limits) as session:
                for name, attack in ATTACKS.items():
                    for mark, value in (("VICTIM", victim), ("LISTED", listed)):
                        attack = attack.replace(mark, str(value))
                    result = await session.python(attack.replace("HOST_IP", own_address()))
                    assert "PWNED" not in result.output, name
                assert "CONNECT" in "".join(seen)  # went to the listed host, as bytes
                works = await session.python(GET.format(f"search:{listed}/still"))
                assert "asked GET /still" in works.output, works.text
        assert robbed == []


@needs_sandbox
async def test_a_name_that_leads_to_no_public_address_is_not_connected_to(caplog):
    """What DNS says of a listed name is not trusted: this machine's own name is the example."""
    name = socket.gethostname().lower()
    try:
        address = socket.gethostbyname(name)
        SessionLimits(network=(f"{name}:80",))
    except (OSError, ValueError):
        pytest.skip(f"the name of this machine, {name!r}, cannot be looked up")
    if public([address]):
        pytest.skip("this machine has a public address")
    robbed = []

    async def serve(_, writer):
        robbed.append(1)
        writer.close()

    running = await asyncio.start_server(serve, address, 0)
    async with running:
        port = running.sockets[0].getsockname()[1]
        limits = SessionLimits(network=(f"{name}:{port}",), wall_s=WAIT_S)
        async with await Session.start(limits) as session:
            result = await session.python(GET.format(f"{name}:{port}/"))
    assert result.exit_code != 0 and not robbed
    assert f"which is no public address; list it as {name}=ADDRESS:{port}" in caplog.text


@needs_sandbox
async def test_connections_are_bounded_and_none_survives_a_call():
    ended = asyncio.Semaphore(0)
    active = most = 0

    async def serve(reader, writer):
        nonlocal active, most
        active += 1
        most = max(most, active)
        await reader.read()
        writer.close()  # from Python 3.12 on the server waits for it
        active -= 1
        ended.release()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        port = running.sockets[0].getsockname()[1]
        limits = SessionLimits(network=(f"search=127.0.0.1:{port}",), wall_s=WAIT_S)
        async with await Session.start(limits) as session:
            many = (
                "import select, socket\n"
                f"all = [socket.create_connection(('search', {port})) for _ in range(60)]\n"
                f"while len(all) > {MAX_CONNECTIONS}:\n"  # nobody says anything: only ends are seen
                "    ended = select.select(all, [], [])[0]\n"
                "    all = [one for one in all if one not in ended]\n"
                "print('bounded')"
            )
            result = await session.python(many)
            assert result.output == "bounded\n", result.text
            async with asyncio.timeout(WAIT_S):
                for _ in range(most):
                    await ended.acquire()
    assert 0 < most <= MAX_CONNECTIONS


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("pypi.org", "has no port; expected HOST:PORT"),
        ("pypi.org:0", "has no port"),
        ("pypi.org:99999", "has no port"),
        ("pypi.org:00000655360", "has no port"),
        ("https://pypi.org:443", "is no host name"),
        ("user@pypi.org:443", "is no host name"),
        ("*.org:443", "is no host name"),
        ("2130706433:80", "is no host name"),
        ("0x7f.1:80", "is no host name"),
        ("10.0.0.5:80", "write server=10.0.0.5:80"),
        ("[::1]:80", "write server="),
        ("a=b.org:80", "'b.org' is no IP address"),
        ("cloud=169.254.169.254:80", "link-local"),
        ("cloud=[fe80::1]:80", "link-local"),
        ("cloud=[fd00:ec2::254]:80", "link-local"),
        ("cloud=[::ffff:169.254.169.254]:80", "link-local"),
        ("all=0.0.0.0:80", "link-local"),
        (7, "expected HOST:PORT"),
    ],
)
def test_addresses_that_cannot_be_meant(entry, says):
    with pytest.raises(ValueError, match=f"sandbox.network.*{says}"):
        SessionLimits.of({"network": [entry]})


@pytest.mark.parametrize(
    "entries",
    [
        ("pypi.org:443", "PyPI.org:443"),
        ("a=10.0.0.5:80", "a=10.0.0.6:80"),
        ("127.0.0.1:80", "localhost:80"),
        ("pypi.org:80", "127.77.0.1:80"),
    ],
)
def test_addresses_that_are_the_same_inside(entries):
    with pytest.raises(ValueError, match="sandbox.network: .*:[0-9]+ is listed twice, or stands"):
        SessionLimits.of({"network": list(entries)})


@needs_sandbox
async def test_a_program_that_tries_again_and_again_warns_once(caplog):
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        limits = SessionLimits(network=(f"search=127.0.0.1:{port}",), wall_s=WAIT_S)
        knock = (
            "import socket\nfor _ in range(9):\n"
            f"    socket.create_connection(('search', {port})).recv(1)"
        )
        async with await Session.start(limits) as session:
            assert (await session.python(knock)).limit is None
    assert caplog.text.count("sandbox.network: search:") == 1


def test_what_a_list_stands_for():
    listed = [Address.of(text) for text in ("PyPI.org:443", "db=10.0.0.5:5432", "pypi.org:80")]
    assert listed[0] == Address("pypi.org", 443) and listed[1].pinned == "10.0.0.5"
    assert inside_ips(listed) == {"pypi.org": "127.77.0.1", "db": "127.77.0.2"}
    assert inside_ips([Address.of("[127.0.0.1]:80")]) == {"127.0.0.1": "127.0.0.1"}
    private = ["127.0.0.1", "10.1.1.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"]
    private += ["::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"]
    assert public([*private, "224.0.0.1", "93.184.216.34", "2606:2800::1"]) == [
        "93.184.216.34",
        "2606:2800::1",
    ]


def own_address() -> str:
    """Of this machine in its network, without sending anything."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.1.1"
