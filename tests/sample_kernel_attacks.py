"""Reward functions that try what the kernel should not let them; each returns 1 when it did.

`sample_attacks` has the plain ones. A few are honest, and must work.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sample_attacks


def attack(how, *args):
    name = f"try_{how}"
    return (globals().get(name) or getattr(sample_attacks, name))(*args)


# -- other processes

_BY_NUMBER = {
    "x86_64": {"ioprio_set": 251, "kcmp": 312, "keyctl": 250, "perf_event_open": 298}
    | {"userfaultfd": 323, "bpf": 321, "fchmodat": 268, "clone": 56, "mount": 165},
    "aarch64": {"ioprio_set": 30, "kcmp": 272, "keyctl": 219, "perf_event_open": 241}
    | {"userfaultfd": 282, "bpf": 280, "fchmodat": 53, "clone": 220, "mount": 40},
}


def _call(name, *args):
    """A system call by its number, as code without a library would make it."""
    everywhere = {"io_uring_setup": 425, "fsopen": 430, "clone3": 435, "process_madvise": 440}
    number = (_BY_NUMBER[os.uname().machine] | everywhere)[name]
    return _checked(ctypes.CDLL(None, use_errno=True).syscall(number, *args))


def _libc(name, *args):
    return _checked(getattr(ctypes.CDLL(None, use_errno=True), name)(*args))


def _checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def try_limit_parent():
    """The kernel would end the run after one second of its CPU time."""
    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (3600, 3600))
    return 1.0


def try_limit_other(pid):
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
    return 1.0


def try_renice_parent():
    os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)
    return 1.0


def try_renice_user():
    os.setpriority(os.PRIO_USER, 0, 19)
    return 1.0


def try_idle_io_of_parent():
    return 1.0 + _call("ioprio_set", 1, os.getppid(), 3 << 13)


def try_pin_parent():
    os.sched_setaffinity(os.getppid(), {min(os.sched_getaffinity(0))})
    return 1.0


def try_schedule_parent():
    os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))
    return 1.0


def try_signal_by_pidfd():
    signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGCONT)
    return 1.0


def try_signal_everybody():
    os.kill(-1, 0)
    return 1.0


def try_signal_group_of_parent():
    os.killpg(os.getpgid(os.getppid()), signal.SIGCONT)
    return 1.0


def try_signal_other(pid):
    os.kill(pid, signal.SIGKILL)
    return 1.0


def try_signal_by_file():
    """A pipe that sends its owner a signal of choice when it can be read."""
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, os.getppid())
    fcntl.fcntl(ours, 10, signal.SIGCONT)  # F_SETSIG
    return 1.0


def try_own_signals():
    """What a program may do to itself: threads and handlers."""
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
    os.kill(os.getpid(), signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    return float(len(seen) == 3)


def try_look(name):
    """`name` of the parent in /proc."""
    return float(len(Path(f"/proc/{os.getppid()}/{name}").read_bytes()) > 0)


def try_follow(name):
    return float(len(os.listdir(f"/proc/{os.getppid()}/{name}/")) > 0)


def try_compare_with_parent():
    return 1.0 + _call("kcmp", os.getpid(), os.getppid(), 0, 0, 0)


# -- facilities of the kernel


def try_new_user():
    return 1.0 + _libc("unshare", 0x10000000)


def try_new_user_by_clone():
    pid = _call("clone", 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return 1.0


def try_mount():
    return 1.0 + _call("mount", b"none", b"/tmp", b"tmpfs", 0, None)


def try_new_mount():
    return float(_call("fsopen", b"tmpfs", 0) >= 0)


def try_keys():
    return float(_call("keyctl", 0, -3, 1) != 0)  # the keys of the session


def try_perf():
    attributes = ctypes.create_string_buffer(b"\1\0\0\0\x70\0\0\0" + bytes(104))
    return float(_call("perf_event_open", attributes, os.getppid(), -1, -1, 0) >= 0)


def try_page_faults():
    return float(_call("userfaultfd", 1) >= 0)


def try_io_uring():
    return float(_call("io_uring_setup", 8, ctypes.create_string_buffer(120)) >= 0)


def try_bpf():
    attributes = ctypes.create_string_buffer(struct.pack("<IIII", 1, 4, 4, 1) + bytes(112))
    return float(_call("bpf", 0, attributes, 128) >= 0)


def try_personality():
    return 1.0 + _libc("personality", 0x0040000)


def try_message_queue():
    return 1.0 + _libc("msgget", 0x6172, 0o1600)


def try_semaphore():
    return 1.0 + _libc("semget", 0x6172, 1, 0o1600)


def try_undumpable():
    return 1.0 + _libc("prctl", 4, 0, 0, 0, 0)


def try_outlive_parent():
    return 1.0 + _libc("prctl", 1, 0, 0, 0, 0)


def try_no_reaper():
    return 1.0 + _libc("prctl", 36, 0, 0, 0, 0)


def try_type_into_terminal():
    fcntl.ioctl(1, 0x5412, b"x")  # TIOCSTI
    return 1.0


def try_terminal():
    return float(os.isatty(0) or os.isatty(1) or os.isatty(2))


# -- memory and disk that no limit of the kernel counts


def _touch(memory):
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    return float(len(memory))


def try_shared_mapping(size):
    return _touch(mmap.mmap(-1, size))


def try_zero_mapping(size):
    with open("/dev/zero", "r+b") as zero:
        return _touch(mmap.mmap(zero.fileno(), size))


def try_memory_file(size):
    fd = os.memfd_create("x")
    os.ftruncate(fd, size)
    return _touch(mmap.mmap(fd, size))


def try_shared_segment(size):
    return float(_libc("shmget", 0, ctypes.c_size_t(size), 0o1600) >= 0)


def try_stack_mapping(size):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_ssize_t
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100  # MAP_GROWSDOWN
    return 1.0 + min(_checked(libc.mmap(None, ctypes.c_size_t(size), 3, flags, -1, 0)), 0)


def try_read_only_memory(size, piece=64 << 20):
    """Memory that was written is no data to the kernel once it is read-only."""
    libc, kept = ctypes.CDLL(None, use_errno=True), []
    for _ in range(0, size, piece):
        kept.append(mmap.mmap(-1, piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        _touch(kept[-1])
        address = ctypes.addressof(ctypes.c_char.from_buffer(kept[-1]))
        _checked(libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(piece), 1))
    time.sleep(50)
    return float(size)


def try_many_files(size, piece=8 << 20):
    for number in range(0, size, piece):
        (Path(os.environ["TMPDIR"]) / f"{number}").write_bytes(b"x" * piece)
    time.sleep(60)
    return 1.0


def try_many_files_in_a_hurry(size):
    """Names that come and go all the time, beside files that stay."""
    folder = Path(os.environ["TMPDIR"])

    def flicker():
        while True:
            (folder / "flicker").touch()
            (folder / "flicker").unlink()

    threading.Thread(target=flicker, daemon=True).start()
    return try_many_files(size)


def try_nameless_files(size, piece=8 << 20):
    kept = []
    for _ in range(0, size, piece):
        kept.append(tempfile.TemporaryFile())  # noqa: SIM115 (its point)
        kept[-1].write(b"x" * piece)
        kept[-1].flush()
    time.sleep(60)
    return 1.0


def try_nameless_maps(size, piece=8 << 20):
    kept = []
    for _ in range(0, size, piece):
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * piece)
            file.flush()
            kept.append(mmap.mmap(file.fileno(), piece))
    time.sleep(60)
    return 1.0


def try_empty_files(count):
    for number in range(count):
        (Path(os.environ["TMPDIR"]) / f"{number}").touch()
    time.sleep(60)
    return 1.0


def try_deep_folders(depth):
    """So deep that no path reaches the last one, and a link to what is not ours."""
    os.chdir(os.environ["TMPDIR"])
    for _ in range(depth):
        os.mkdir("d" * 50)
        os.chdir("d" * 50)
    os.symlink("/etc", "link")
    os.chdir("/")
    return 1.0


def try_exit():
    os._exit(3)


def try_burn():
    """CPU time without end, whatever the kernel says about it."""
    for signum in (signal.SIGXCPU, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF):
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sample_attacks.try_endless_loop()


def try_burn_in_child():
    if os.fork() == 0:
        try_burn()
    time.sleep(120)


def try_threads(count):
    threading.stack_size(128 << 10)  # the least on ARM
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(120,), daemon=True).start()
    time.sleep(60)
    return 1.0


def try_print(size):
    line = "x" * 999
    for _ in range(0, size, 1000):
        print(line)
    return 1.0


# -- files


def try_read(path):
    return float(len(Path(path).read_bytes()) > 0)


def try_read_device(path):
    with open(path, "rb") as device:
        return float(len(device.read(512)) > 0)


def try_forge_reply(text):
    """An answer of its own making to the call that runs."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, text.encode() + b"\n")
    time.sleep(0.5)
    return 0.5


def try_read_around(path):
    """Every other name of a file that may lead to it."""
    own = Path(os.environ["TMPDIR"])
    got = []
    for trick in (_by_link, _by_hard_link, _by_move, _by_root, _by_descriptor):
        with contextlib.suppress(OSError):
            got.append(len(trick(Path(path), own)) > 0)
    return float(any(got))


def _by_link(path, own):
    (own / "link").symlink_to(path)
    return (own / "link").read_bytes()


def _by_hard_link(path, own):
    os.link(path, own / "hard")
    return (own / "hard").read_bytes()


def _by_move(path, own):
    os.rename(path.parent, own / "moved")
    return (own / "moved" / path.name).read_bytes()


def _by_root(path, own):
    return Path(f"/proc/self/root{path}").read_bytes()


def _by_descriptor(path, own):
    fd = os.open(path, os.O_PATH)
    return Path(f"/proc/self/fd/{fd}").read_bytes()


def try_lock(path):
    """A shared lock on a file that was opened for reading keeps writers out."""
    with open(path, "rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        time.sleep(0.5)
    return 1.0


def try_lease(path):
    with open(path, "rb") as file:
        fcntl.fcntl(file, 1024, fcntl.F_RDLCK)  # F_SETLEASE
    return 1.0


def try_change_mode(path):
    for change in (
        lambda: os.chmod(path, 0),
        lambda: os.chown(path, 65534, 65534),
        lambda: os.setxattr(path, "user.areal", b"x"),
        lambda: _call("fchmodat", -100, os.fsencode(path), 0),
    ):
        with contextlib.suppress(OSError):
            change()
    return 1.0


def try_sqlite():
    """A database of its own needs locks."""
    with sqlite3.connect(Path(os.environ["TMPDIR"]) / "own.db") as database:
        database.execute("CREATE TABLE t (x)")
        database.execute("INSERT INTO t VALUES (1.0)")
        return database.execute("SELECT x FROM t").fetchone()[0]


def try_usual_work():
    """What honest code does all the time."""
    with tempfile.TemporaryDirectory() as folder:
        source, copy = Path(folder) / "a", Path(folder) / "b"
        source.write_text("x")
        source.touch()
        os.utime(source)
        shutil.copy2(source, copy)
        shutil.make_archive(str(Path(folder) / "all"), "gztar", folder)
        shutil.unpack_archive(str(Path(folder) / "all.tar.gz"), Path(folder) / "out")
    pairs = [socket.socketpair(), os.pipe()]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(abs, range(100)))
    asyncio.run(asyncio.sleep(0))
    socket.getaddrinfo("localhost", 80)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    return float(len(pairs) == 2)


# -- sockets


def try_unix_socket(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    return 1.0


def try_unix_datagram(path):
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        end.sendto(b"x", path)
    return 1.0


def try_vsock():
    socket.socket(40, socket.SOCK_STREAM).close()
    return 1.0


# -- with processes


def try_child_of_parent():
    """A process whose parent is the run: not among the descendants of this one."""
    pid = _call("clone", 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os.setsid()
        time.sleep(120)
        os._exit(0)
    return 1.0


def try_false_name():
    """A process that looks dead to whoever reads its name for its state."""
    if os.fork() == 0:
        os.setsid()
        _libc("prctl", 15, b"x) Z 1", 0, 0, 0)  # PR_SET_NAME
        time.sleep(120)
        os._exit(0)
    time.sleep(120)


def try_chain_of_forks(length):
    """Each process starts the next one: deeper than a recursive search gets."""
    for _ in range(length):
        if os.fork() != 0:
            break
    time.sleep(120)
    os._exit(0)


def try_capabilities_of_child():
    done = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("CapEff"))
    return float(int(line.split()[1], 16) != 0)


def try_processes(count):
    for _ in range(count):
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
    time.sleep(60)
    return 1.0


def try_open_files():
    """Those that are open besides standard input and output and the connection."""
    return float(len(os.listdir("/proc/self/fd")) - 1)
