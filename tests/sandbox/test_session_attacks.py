"""Attacks from inside of a sandbox session: none reaches anything, none breaks the session."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import pytest
from sample_session_attacks import GREEDY, PYTHON_ATTACKS, SHELL_ATTACKS
from sandbox_support import needs_sandbox

from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session
from areal.sandbox.sessions import SessionPool

pytestmark = needs_sandbox

ATTACK_S = 1.5  # of an attack; what must work has a minute, on however busy a machine
LIMITS = SessionLimits(wall_s=60, cpu_s=1, memory_mb=96, max_processes=12, disk_mb=8)
GRADER = "import answer\nprint('right' if answer.value() == 4 else 'wrong')\n"


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What an attacker would like to have."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "token").write_text("sesame-token")
    server = socket.create_server(("127.0.0.1", 0))
    here = socket.socket(socket.AF_UNIX)
    here.bind(str(folder / "socket"))
    here.listen()
    hidden = socket.socket(socket.AF_UNIX)
    hidden.bind(f"\0areal-attack-{os.getpid()}")  # other workers of the suite have their own
    hidden.listen()
    os.environ["AREAL_ATTACK_TOKEN"] = "sesame-variable"
    yield {
        "TOKEN_FILE": str(folder / "token"),
        "SOCKET": str(folder / "socket"),
        "PORT": str(server.getsockname()[1]),
        "HOST_PID": str(os.getpid()),
    }
    del os.environ["AREAL_ATTACK_TOKEN"]
    assert (folder / "token").read_text() == "sesame-token"
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.accept()  # nobody came
    for one in (server, here, hidden):
        one.close()


@pytest.fixture(scope="module")
def results(outside):
    """All attacks, in one session, one after another."""

    def aimed(code):
        for name, value in outside.items():
            code = code.replace(name, value)
        return code

    async def attack():
        found = {}
        async with await Session.start(LIMITS) as session:
            for name, code in PYTHON_ATTACKS.items():
                found[name] = await session.python(aimed(code), wall_s=ATTACK_S)
            for name, script in SHELL_ATTACKS.items():
                found[name] = await session.shell(aimed(script), wall_s=ATTACK_S)
            for name, (code, _) in GREEDY.items():
                found[name] = await session.python(code, wall_s=ATTACK_S)
                await session.shell("rm -rf big s")
            found["after all"] = await session.python("print('still here')")
        return found

    return asyncio.run(attack())


@pytest.mark.parametrize("name", [*PYTHON_ATTACKS, *SHELL_ATTACKS])
def test_an_attack_gets_nothing(results, name):
    assert "PWNED" not in results[name].output, results[name].output
    assert "sesame" not in results[name].output


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_program_is_ended_by_its_limit(results, name):
    result, limit = results[name], GREEDY[name][1]
    assert result.exit_code != 0
    if limit is not None:
        assert result.limit in (limit, "wall_s", "cpu_s", "max_processes")


def test_the_session_survives_every_attack(results):
    assert results["after all"].output == "still here\n"
    assert threading.active_count() < 50


async def test_nothing_but_files_survives_a_call():
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.3)\n"
        "        open('late', 'w').write('x')\n"
        "    os._exit(0)\n"
        "open('now', 'w').write('x')\n"
    )
    async with await Session.start(LIMITS) as session:
        await session.python(daemon)
        await asyncio.sleep(0.5)
        listed = await session.shell("ls; ls /proc")
        assert "now" in listed.output and "late" not in listed.output
        # Process 1, who serves the call, sh, ls.
        assert sum(name.isdigit() for name in listed.output.split()) <= 4


async def test_a_call_cannot_look_into_earlier_ones():
    look = (
        "import re\n"
        "found = 0\n"
        "for line in open('/proc/self/maps'):\n"
        "    start, end, mode = re.match(r'(\\w+)-(\\w+) (..)', line).groups()\n"
        "    if mode != 'rw':\n"
        "        continue\n"
        "    with open('/proc/self/mem', 'rb', 0) as memory:\n"
        "        memory.seek(int(start, 16))\n"
        "        try:\n"
        "            data = memory.read(int(end, 16) - int(start, 16))\n"
        "        except OSError:\n"
        "            continue\n"
        "    found += data[::-1].count(b'emasesemases')\n"
        "print(found, len(HERE))\n"
    )
    async with await Session.start(SessionLimits(wall_s=60, cpu_s=30)) as session:
        await session.write_file("secret", b"sesamesesame")
        await session.python("text = 'sesamesesame'")
        assert await session.read_file("secret") == b"sesamesesame"
        await session.shell("rm secret")
        assert (await session.python(look.replace("HERE", "''"))).output == "0 0\n"
        # It does find what is there: its own text, at least.
        found = await session.python(look.replace("HERE", "'sesamesesame'"))
        assert int(found.output.split()[0]) > 0


async def test_zeros_can_be_read_without_end():
    async with await Session.start(LIMITS) as session:
        copied = await session.shell("head -c 3000000 /dev/zero | wc -c; : > /dev/zero")
        assert copied.output.startswith("3000000\n") and copied.exit_code != 0


async def test_output_is_cut_and_cannot_be_a_reply():
    async with await Session.start(LIMITS) as session:
        flood = await session.python("print('x' * 100_000)")
        assert flood.is_cut and len(flood.output) == LIMITS.output_bytes
        forged = await session.python("print('{\"exit\": 0}'); raise SystemExit(3)")
        assert forged.exit_code == 3 and forged.output == '{"exit": 0}\n'
        assert (await session.python("print(b'\\xff\\x1b[2J'.decode('latin1'))")).exit_code == 0


@pytest.mark.parametrize(
    "planted, verdict",
    [
        ({"answer.py": "def value(): return 4"}, "right"),
        ({"answer.py": "def value(): return 5", "test.py": "print('right')"}, "wrong"),
        ({"answer.py": "def value(): return 5", "json.py": "print('right')"}, "wrong"),
        ({"answer.py": "def value(): return 5", "sitecustomize.py": "print('right')"}, "wrong"),
        ({"sitecustomize.py": "print('right')"}, None),
    ],
)
async def test_the_grader_runs_in_a_clean_session(planted, verdict):
    pool = SessionPool(LIMITS, num_warm=0)
    try:
        async with pool.session() as session:
            for path, text in planted.items():
                await session.write_file(path, text.encode())
            result = await pool.grade(
                session, ["answer.py"], {"test.py": GRADER.encode()}, ["python3", "test.py"]
            )
    finally:
        await pool.close()
    if verdict is None:  # no answer: the grader says so
        assert result.exit_code != 0 and "right" not in result.output
    else:
        assert result.output == f"{verdict}\n"
