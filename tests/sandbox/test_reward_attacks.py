"""Attacks of a confined reward on the run, the machine and its limits: each made for real."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attack_report import nobody_can_run, outcomes

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the limits tried here are kept by Linux",
)
GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(params=["me", "nobody"])
def user(request):
    """The user of the tests, often root, and one without any rights."""
    if request.param == "nobody" and not nobody_can_run():
        pytest.skip("needs root, and a Python and sources that others can read")
    return request.param


@pytest.fixture
def neighbour(user):
    """Another process of the same user, as a server of the run is."""
    options = {"user": 65534, "group": 65534} if user == "nobody" else {}
    process = subprocess.Popen(["sleep", "600"], **options)
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def shared_folder():
    """A folder that everybody may enter; pytest's own are for the user alone."""
    folder = Path(f"/tmp/areal-attacks-{os.getpid()}")
    folder.mkdir(mode=0o755)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)  # shutil cannot remove deep ones


def landlock_abi():
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)


def test_the_run_and_its_processes_are_out_of_reach(user, neighbour):
    attacks = [
        *(["limit_parent"], ["limit_other", neighbour]),
        *(["renice_parent"], ["renice_user"], ["idle_io_of_parent"], ["pin_parent"]),
        *(["schedule_parent"], ["signal_parent"], ["signal_by_pidfd"], ["signal_everybody"]),
        *(["signal_group_of_parent"], ["signal_other", neighbour], ["signal_by_file"]),
        *(["trace_parent"], ["parent_memory"], ["compare_with_parent"]),
        *([["look", name] for name in ("environ", "maps", "fd/0", "auxv", "syscall")]),
        *([["follow", name] for name in ("cwd", "root", "map_files")]),
    ]
    for attack, found in zip(attacks, outcomes(*attacks, user=user), strict=True):
        assert "not permitted" in str(found) or "Permission denied" in str(found), (attack, found)
    os.kill(neighbour, 0)


def test_facilities_of_the_kernel_are_shut(user):
    attacks = [
        *(["new_user"], ["new_user_by_clone"], ["mount"], ["new_mount"], ["keys"], ["perf"]),
        *(["page_faults"], ["io_uring"], ["bpf"], ["personality"], ["message_queue"]),
        *(["semaphore"], ["undumpable"], ["outlive_parent"], ["no_reaper"], ["vsock"]),
        *(["shared_segment", MIB], ["memory_file", MIB], ["type_into_terminal"]),
    ]
    for attack, found in zip(attacks, outcomes(*attacks, user=user), strict=True):
        assert "not permitted" in str(found) or "not implemented" in str(found), (attack, found)


def test_honest_code_works(user):
    honest = ["own_signals", "sqlite", "usual_work", "thread", "temporary"]
    assert outcomes(*([name] for name in honest), user=user) == [1.0] * len(honest)


def test_memory_that_the_kernel_does_not_count_is_refused_or_ends_the_process(user):
    attacks = [["shared_mapping", 64 * MIB], ["zero_mapping", 64 * MIB], ["stack_mapping", GIB]]
    for found in outcomes(*attacks, user=user):
        assert "not permitted" in str(found) or "Permission denied" in str(found)
    [found] = outcomes(["read_only_memory", GIB], user=user, memory_gb=0.25)
    assert "took more memory than limits.memory_gb" in str(found)


@pytest.mark.parametrize(
    "how", ["many_files", "many_files_in_a_hurry", "nameless_files", "nameless_maps"]
)
def test_the_disk_is_bounded_in_all(how):
    [found] = outcomes([how, 256 * MIB], disk_mb=64)
    assert "kept more in $TMPDIR than limits.disk_mb=64 allows" in str(found)


def test_so_are_files_and_threads():
    [found] = outcomes(["empty_files", 60_000])
    assert "kept more than 50000 files" in str(found)
    [found] = outcomes(["threads", 5000])
    assert "started more than 4096 threads" in str(found) or "can't start new" in str(found)


def test_a_folder_too_deep_for_any_path_is_removed(shared_folder, monkeypatch):
    """Twice: whatever the first leaves behind must not keep the pool from its work."""
    monkeypatch.setenv("AREAL_TEST_TMPDIR", str(shared_folder))
    found = outcomes(["deep_folders", 2000], ["exit"], ["temporary"])
    assert found[0] == 1.0 or "$TMPDIR" in found[0]  # whoever is faster
    assert "exit code" in str(found[1]) or "$TMPDIR" in str(found[1])
    assert found[2] == 1.0
    assert list(shared_folder.iterdir()) == []


def test_cpu_time_is_bounded_whatever_the_function_ignores(user):
    began = time.monotonic()
    [found] = outcomes(["burn"], user=user, timeout_s=900, cpu_seconds=1)
    assert "took more CPU time than limits.cpu_seconds=1 allows" in str(found)
    [found] = outcomes(["burn_in_child"], user=user, timeout_s=900, cpu_seconds=1, max_processes=2)
    assert "took more CPU time than limits.cpu_seconds=1 allows" in str(found)
    assert time.monotonic() - began < 100


def test_root_too_is_held_to_its_number_of_processes():
    [found] = outcomes(["processes", 40], max_processes=10)
    assert "max_processes=10" in str(found) or "temporarily unavailable" in str(found)


@pytest.mark.parametrize(
    "attack", [["child_of_parent"], ["false_name"], ["chain_of_forks", 1100]], ids=lambda it: it[0]
)
def test_no_process_stays_behind(attack, user):
    before = sleepers()
    [found] = outcomes(attack, user=user, timeout_s=4, max_processes=1500)
    assert any(text in str(found) for text in ("not permitted", "did not return", "unavailable"))
    deadline = time.monotonic() + 300
    while sleepers() - before:
        assert time.monotonic() < deadline, "a process lives on"
        time.sleep(0.05)


def sleepers():
    """Live processes that run the worker's file."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if b"sandbox/worker.py" in (folder / "cmdline").read_bytes() and state != "Z":
                found.add(folder.name)
        except OSError:
            continue
    return found


def test_what_it_starts_has_no_capabilities():
    assert outcomes(["capabilities_of_child"], max_processes=2) == [0.0]


def test_it_holds_nothing_of_the_run_but_its_connection():
    assert outcomes(["open_files"], ["terminal"]) == [4.0, 0.0]


@pytest.mark.skipif(landlock_abi() < 1, reason="this kernel has no Landlock")
def test_the_folder_of_the_run_is_neither_read_nor_locked(shared_folder, monkeypatch):
    """A lock on a file that was opened for reading would keep the run from its own database."""
    run = shared_folder / "runs" / "experiment" / "trial"
    run.mkdir(parents=True)
    beside = shared_folder / "runs" / "data.jsonl"
    beside.write_text("{}")
    database = sqlite3.connect(run / "run.db", isolation_level=None, timeout=0)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE t (x)")
    monkeypatch.setenv("AREAL_RUN_FOLDER", str(run))
    files = ["run.db", "run.db-shm", "run.db-wal"]
    attacks = [[how, str(run / name)] for name in files for how in ("read", "lock", "lease")]
    attacks += [["read_around", str(run / "run.db")]]
    *found, around, honest = outcomes(*attacks, ["read", str(beside)])
    assert all("Permission denied" in str(one) for one in found), found
    assert (around, honest) == (0.0, 1.0)
    database.execute("INSERT INTO t VALUES (1)")
    assert sorted(path.name for path in run.iterdir()) == sorted(files)


@pytest.mark.skipif(landlock_abi() < 1, reason="this kernel has no Landlock")
def test_keys_are_not_read(shared_folder, monkeypatch):
    keys, notes = shared_folder / "keys", shared_folder / "notes"
    for file in (keys / "deep" / "id", notes):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (shared_folder / "link").symlink_to(keys)  # readable names that lead there
    found = outcomes(
        ["read", str(keys / "deep" / "id")],
        ["read", str(shared_folder / "link" / "deep" / "id")],
        ["read", str(notes)],
        unreadable=[str(keys), str(shared_folder / "missing")],
    )
    assert "Permission denied" in found[0] and "limits.unreadable" in found[0]
    assert "Permission denied" in found[1]
    assert found[2] == 1.0


@pytest.mark.skipif(landlock_abi() < 1, reason="this kernel has no Landlock")
def test_nor_are_disks_below_the_file_system():
    disks = [str(path) for path in Path("/dev").iterdir() if path.is_block_device()]
    for found in outcomes(*(["read_device", disk] for disk in disks[:3])):
        assert "Permission denied" in str(found) or "No such device" in str(found)


@pytest.mark.parametrize(
    "reply",
    [
        '{"id": 1, "value": 1.0, "s": NaN}',
        '{"id": 1, "value": true, "s": 0.1}',
        '{"id": 1, "value": 1e999, "s": 0.1}',
        '{"id": 1, "error": ["\\ud83d"]}',
        '{"id": 2, "value": 1.0, "s": 0.1}',
        '{"ready": true, "unkept": [{"\\ud83d": 1}]}',
        '{"fatal": "\\ud83d"}',
    ],
)
def test_a_forged_reply_is_an_error_of_its_own_call(reply):
    """What its process then says out of turn may cost it another call, and no more."""
    forged, _, honest = outcomes(["forge_reply", reply], ["thread"], ["thread"])
    assert isinstance(forged, str) and "\ud83d" not in forged
    assert honest == 1.0


def test_modes_and_owners_of_files_stay(shared_folder):
    file = shared_folder / "file"
    file.write_text("x")
    before = file.stat()
    assert outcomes(["change_mode", str(file)]) == [1.0]
    after = file.stat()
    assert (before.st_mode, before.st_uid) == (after.st_mode, after.st_uid)
    assert os.listxattr(file) == []


def test_sockets_of_this_machine_are_shut(shared_folder):
    """Behind them are programs that do what they are told: a container engine, a terminal."""
    path = str(shared_folder / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        attacks = [["unix_socket", path], ["unix_socket", "\0areal-abstract"]]
        attacks += [["unix_datagram", path]]
        for found in outcomes(*attacks):
            assert "not permitted" in str(found)


def test_what_it_prints_does_not_fill_the_log(capfd):
    order = '{"attacks": [["print", 20000000]], "limits": {}, "timeout_s": 120}'
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "attack_report.py"), order],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"},
        capture_output=True,
        timeout=900,
        check=True,
    )
    assert b"[1.0]" in done.stdout
    assert 500_000 < len(done.stderr) < 12_000_000
    assert b"attack prints too much; what follows is dropped" in done.stderr
