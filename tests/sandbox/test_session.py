"""Sandbox sessions: commands, files, limits, and what is an error of ours."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_support import needs_sandbox

from areal.sandbox import isolation
from areal.sandbox.isolation import SandboxError
from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session
from areal.sandbox.sessions import SessionPool

pytestmark = needs_sandbox

# Prints its descendants when one of them is the command.
_LONG_CALL = """
import asyncio, os, pathlib
from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session
from areal.utils.stacks import descendants

def names(pids):
    return [pathlib.Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]

async def main():
    session = await Session.start(SessionLimits(wall_s=300))
    call = asyncio.create_task(session.run(["sleep", "300"]))
    while "sleep" not in names(found := list(descendants(os.getpid()))):
        await asyncio.sleep(0.02)
    print(*found, flush=True)
    await call

asyncio.run(main())
"""


async def test_files_stay_and_variables_do_not():
    async with await Session.start() as session:
        await session.write_file("data/in.txt", b"1 2 3\n")
        summed = await session.python("print(sum(map(int, open('data/in.txt').read().split())))")
        assert (summed.exit_code, summed.output, summed.limit) == (0, "6\n", None)
        assert (await session.shell("tr ' ' + < data/in.txt > out; pwd")).output == "/workspace\n"
        assert await session.read_file("out") == b"1+2+3\n"
        await session.python("x = 1")
        lost = await session.python("import os\nos.chdir('/tmp')\nprint(x)")
        assert lost.exit_code == 1 and "NameError: name 'x' is not defined" in lost.output
        assert "print(x)" in lost.output and "session_init" not in lost.output
        assert (await session.run(["cat"], stdin=b"a" * 9000)).output == "a" * 9000
        await session.write_file("helper.py", b"value = 7")
        assert (await session.python("import helper\nprint(helper.value)")).output == "7\n"
        assert (await session.python("import sys\nsys.exit('bye')")).text.startswith(
            "bye\n[it ended"
        )
        assert (await session.run(["no-such-program"])).exit_code == 127
        with pytest.raises(OSError, match="nothing: .*No such file"):
            await session.read_file("nothing")


async def test_folders_and_variables_of_its_own_and_a_tree_that_moves():
    limits = SessionLimits(
        writable=("/app", "/app/deep", "/srv/data"), workdir="/app/work", env={"LEVEL": "a b"}
    )
    make = (
        "pwd; echo $LEVEL; echo 1 > one; mkdir d && echo 2 > d/two && chmod 700 d/two; "
        "ln -s d/two link; truncate -s 40M sparse; touch /srv/data/x /app/deep/y; "
        "echo no > secret; chmod 000 secret"
    )
    async with await Session.start(limits) as session, await Session.start(limits) as other:
        made = await session.shell(make)
        assert (made.exit_code, made.output) == (0, "/app/work\na b\n"), made.text
        await other.write_tree("/app", await session.read_tree("/app"))
        found = await other.shell(
            "cat one link; ls -l d/two | cut -c1-10; du -k sparse | cut -f1; ls"
        )
        assert found.output == "1\n2\n-rwx------\n0\nd\nlink\none\nsparse\n", found.text
        await session.shell("rm -rf /workspace/.root/app")
        gone = await session.shell("echo hi")
        assert gone.exit_code == 127 and "/app/work: No such file" in gone.output
        with pytest.raises(FileNotFoundError, match="/app is no folder"):
            await session.read_tree("/app")
        with pytest.raises(OSError, match="/app: .*tar"):
            await other.write_tree("/app", b"no archive")


async def test_an_interpreter_of_the_user_brings_its_packages():
    limits = SessionLimits(python=sys.executable, wall_s=60, cpu_s=60)
    async with await Session.start(limits) as session:
        found = await session.python("import idna, sys\nprint(sys.prefix)")
    assert found.output == f"{sys.prefix}\n", found.text


async def test_a_call_may_have_less_time_and_what_was_written_is_returned():
    async with await Session.start() as session:
        endless = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
        slow = await session.python(endless, wall_s=5)
        assert slow.limit == "wall_s" and slow.output == "begun\n"
        assert slow.text == "begun\n[ended: more than wall_s allows]"


async def test_a_link_is_shown_with_what_it_leads_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("hello")
    (tmp_path / "between").symlink_to("folder")
    (tmp_path / "link").symlink_to("between")
    limits = SessionLimits(readable=(str(tmp_path / "link"),))
    async with await Session.start(limits) as session:
        assert (await session.shell(f"cat {tmp_path}/link/file")).output == "hello"


async def test_a_session_that_is_gone_is_our_failure_and_no_result():
    session = await Session.start()
    os.kill(session._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the session ended"):
        await session.python("print(1)")
    await session.close()


def test_a_session_ends_with_the_process_that_started_it():
    program = [sys.executable, "-c", _LONG_CALL]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        session = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(session) >= 2
    deadline = time.monotonic() + 60
    while any(map(_runs, session)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def test_a_command_that_cannot_be_confined_is_our_failure_and_no_result():
    limits = SessionLimits()
    object.__setattr__(limits, "cpu_s", float("inf"))  # something that no check has foreseen
    async with await Session.start(limits) as session:
        with pytest.raises(SandboxError, match="OverflowError"):
            await session.shell("echo hello")


async def test_large_input_and_output_arrive_whole():
    data = bytes(range(256)) * (3 << 12)  # more than a pipe holds, and than is sent at once
    async with await Session.start(SessionLimits(wall_s=900.0)) as session:
        await session.write_file("data", data)
        tree = await session.read_tree("/workspace")
        await session.write_tree("/workspace/copy", tree)
        assert (
            await session.shell("cmp data copy/data && wc -c < data")
        ).output == f"{len(data)}\n"
        with pytest.raises(OSError, match="has more than"):
            await session.read_file("data")
        await session.shell("head -c 99999 data > some")
        assert await session.read_file("some") == data[:99999]


async def test_a_cancelled_call_ends_the_session():
    async with await Session.start() as session:
        call = asyncio.create_task(session.python("import time; time.sleep(9)"))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert session._process.poll() is not None


async def test_a_pool_bounds_its_sessions_and_gives_each_out_once():
    pool = SessionPool(SessionLimits(), num_warm=1, max_sessions=2)
    active, most, seen = 0, 0, []

    async def use(number):
        nonlocal active, most
        async with pool.session() as session:
            active, most = active + 1, max(most, active + 1)
            seen.append((await session.shell("ls; touch mark")).output)
            active -= 1

    await asyncio.gather(*map(use, range(5)))
    await pool.close()
    assert most <= 2 and seen == [""] * 5


async def test_where_no_way_works_the_error_says_what_to_change(monkeypatch):
    monkeypatch.setattr("sys.base_exec_prefix", "/nowhere")
    with pytest.raises(SandboxError, match="no sandbox can be started .*install bubblewrap"):
        await Session.start()
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SandboxError, match="need Linux, and this is darwin"):
        isolation.ways()


_WITHOUT_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
    "sh",
)


def test_where_namespaces_are_off_the_error_is_one_line_with_advice():
    if subprocess.run([*_WITHOUT_NAMESPACES, "true"], capture_output=True).returncode != 0:
        pytest.skip("no user namespace in which others could be switched off")
    code = (
        "import asyncio\nfrom areal.sandbox.session import SandboxError, Session\n"
        "try:\n    asyncio.run(Session.start())\nexcept SandboxError as error:\n    print(error)"
    )
    told = subprocess.run([*_WITHOUT_NAMESPACES, sys.executable, "-c", code], capture_output=True)
    assert told.stdout.startswith(b"no sandbox can be started (") and told.stdout.count(b"\n") == 1
    assert b"user.max_user_namespaces above 0" in told.stdout


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory": 5}, "sandbox.memory: unknown key; expected one of wall_s"),
        ({"wall_s": 0}, "sandbox.wall_s must be above 0, got 0"),
        ({"disk_mb": "many"}, "sandbox.disk_mb must be above 0, got 'many'"),
        ({"wall_s": float("nan")}, "sandbox.wall_s must be above 0, got nan"),
        ({"cpu_s": float("inf")}, "sandbox.cpu_s must be at most [0-9]+, got inf"),
        ({"memory_mb": 10**30}, "sandbox.memory_mb must be at most [0-9]+, got 1000"),
        ({"max_processes": 2.5}, "sandbox.max_processes must be a whole number, got 2.5"),
        ({"python": "venv/bin/python"}, "does not exist, or is not an absolute path"),
        ({"writable": ["app"]}, "sandbox.writable: 'app' cannot be a folder of a session's own"),
        ({"writable": ["/app/.."]}, "cannot be a folder of a session's own"),
        ({"writable": ["/usr/local/x"]}, "not below .*/usr"),
        ({"writable": "/app"}, "sandbox.writable: expected a list, got '/app'"),
        ({"workdir": "/app"}, "sandbox.workdir: '/app' is no folder .*sandbox.writable"),
        ({"workdir": "/workspace/../etc"}, "sandbox.workdir: .* is no folder"),
        ({"workdir": 5}, "sandbox.workdir: 5 is no folder of the session's own"),
        ({"readable": [5]}, "sandbox: 5 does not exist, or is not an absolute path"),
        ({"env": {"A": 1}}, "sandbox.env: 'A' is not a variable with a text"),
        ({"env": {"A": "\ud800"}}, "sandbox.env: 'A' is not a variable with a text"),
        ({"env": ["A"]}, "sandbox.env: expected variables with texts, got \\['A'\\]"),
        ({"network": None}, "sandbox.network: expected a list, got None"),
    ],
)
def test_mistakes_name_the_key(options, message):
    with pytest.raises(ValueError, match=message):
        SessionLimits.of(options)
