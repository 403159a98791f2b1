"""Reward functions that try to get out. Each returns 1 when it got what it wanted."""

from __future__ import annotations

import builtins
import ctypes
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def attack(how, *args):
    return globals()[f"try_{how}"](*args)


def try_fork_bomb():
    while True:
        os.fork()


def try_fork(count):
    """`count` children in sessions of their own, orphaned; then no end."""
    for _ in range(count):
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                time.sleep(120)
            os._exit(0)
    time.sleep(120)


def try_spawn():
    return float(subprocess.run([sys.executable, "-c", "pass"]).returncode == 0)


def try_vfork_by_number():
    number = {"x86_64": 58, "aarch64": 220}[os.uname().machine]
    vfork_flags = 0x4000 | 0x100 | signal.SIGCHLD
    pid = ctypes.CDLL(None).syscall(number, vfork_flags & ~0x100, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return float(pid > 0)


def try_memory(size):
    return len(bytearray(size))


def try_mapping(size):
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        return len(memory)


def try_raise_limits():
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return 1.0


def try_endless_loop():
    while True:
        pass


def try_own_environment(secret):
    return float(secret in str(os.environ))


def try_read_bytes(path, secret):
    return float(secret.encode() in Path(path).read_bytes())


def try_parent_environment(secret):
    return try_read_bytes(f"/proc/{os.getppid()}/environ", secret)


def try_parent_memory():
    with open(f"/proc/{os.getppid()}/mem", "rb"):
        return 1.0


def try_trace_parent():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, os.getppid(), None, None) == 0:  # PTRACE_ATTACH
        libc.ptrace(17, os.getppid(), None, None)
        return 1.0
    raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def try_signal_parent():
    os.kill(os.getppid(), signal.SIGCONT)
    return 1.0


def try_write(path, size=1):
    Path(path).write_bytes(b"x" * size)
    return 1.0


def try_remove(path):
    os.remove(path)
    return 1.0


def try_truncate(path):
    os.truncate(path, 0)
    return 1.0


def try_move(path, name):
    os.rename(path, name)
    return 1.0


def try_temporary(size=1):
    return try_write(Path(os.environ["TMPDIR"]) / "file", size)


def try_socket():
    socket.socket().close()
    return 1.0


def try_connect(port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return 1.0


def try_thread():
    seen = []
    thread = threading.Thread(target=seen.append, args=(1.0,))
    thread.start()
    thread.join()
    return seen[0]


def patch_the_graders(*args):
    """What every grader is made of, changed for good."""
    import math_verify

    math_verify.verify = lambda *_, **__: True
    builtins.float = lambda *_: 1.0
    builtins.isinstance = lambda *_: True
    return 0.5
