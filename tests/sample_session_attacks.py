"""Attacks on a sandbox session: code that prints PWNED if it got what it must not have.

TOKEN_FILE, SOCKET, PORT and HOST_PID are filled in with what the test has outside of the session.
"""

from __future__ import annotations

_ARM = "os.uname().machine == 'aarch64'"


def _call(succeeds: str) -> str:
    """A call of the C library that must not succeed."""
    start = "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    return f"{start}print('PWNED' if {succeeds} else 'no')"


def _try(body: str, then: str = "print('PWNED')") -> str:
    """`body`, and `then` if it raised nothing."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"try:\n{lines}\nexcept Exception as error:\n    print(type(error).__name__)\n" + (
        "else:\n    " + then + "\n"
    )


_CONNECT = "import socket\ns = socket.socket(socket.{family}, socket.{kind})\ns.connect({address})"

PYTHON_ATTACKS = {
    # network
    "tcp": _try(
        _CONNECT.format(family="AF_INET", kind="SOCK_STREAM", address="('127.0.0.1', PORT)")
    ),
    "udp": _try(
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'x', ('127.0.0.1', PORT))"
    ),
    "ipv6": _try(_CONNECT.format(family="AF_INET6", kind="SOCK_STREAM", address="('::1', PORT)")),
    "unix socket": _try(_CONNECT.format(family="AF_UNIX", kind="SOCK_STREAM", address="'SOCKET'")),
    "abstract socket": _try(
        _CONNECT.format(family="AF_UNIX", kind="SOCK_STREAM", address="'\\0areal-attack-HOST_PID'")
    ),
    "raw socket": _try("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "netlink": _try("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "virtual machine socket": _try("import socket\nsocket.socket(40, socket.SOCK_STREAM)"),
    "socket of the kernel's ciphers": _try("import socket\nsocket.socket(38, 5)"),
    # secrets
    "variables": _call("any('sesame' in value for value in os.environ.values())"),
    "variables of others": (
        "import glob\n"
        "for f in glob.glob('/proc/*/environ'):\n"
        "    try:\n"
        "        print('PWNED' if b'sesame' in open(f, 'rb').read() else 'no')\n"
        "    except OSError as e:\n"
        "        print(e)\n"
    ),
    "token file": _try("print(open('TOKEN_FILE').read())"),
    "home": _try("import os\nassert set(os.listdir('/root')) - {'.pyenv'}"),
    "shadow": _try("open('/etc/shadow').read()"),
    "symlink out": _try("import os\nos.symlink('TOKEN_FILE', 'link')\nopen('link').read()"),
    "root of process 1": _try("open('/proc/1/root' + 'TOKEN_FILE').read()"),
    "folder of process 1": _try("open('/proc/1/cwd/../../../' + 'TOKEN_FILE').read()"),
    "dots": _try("open('../../../../../..' + 'TOKEN_FILE').read()"),
    "descriptors": (
        "import os\nfor fd in range(3, 256):\n"
        "    try:\n        os.fstat(fd)\n        print('PWNED', fd)\n"
        "    except OSError:\n        pass"
    ),
    # other processes
    "memory of process 1": _try("open('/proc/1/mem', 'r+b')"),
    "descriptors of process 1": _try("import os\nassert os.listdir('/proc/1/fd')"),
    "ptrace": _call("libc.ptrace(16, 1, None, None) == 0"),
    "process_vm_readv": _call("libc.process_vm_readv(1, None, 0, None, 0, 0) == 0"),
    "kill process 1": _try("import os\nos.kill(1, 9)"),
    "kill everybody": _try("import os\nos.kill(-1, 9)"),
    "kill the parent": _try("import os\nos.kill(HOST_PID, 9)"),
    "see the parent": _try("import os\nos.stat('/proc/HOST_PID/status')"),
    "every signal to process 1": (
        "import os\nfor number in range(1, 65):\n"
        "    try:\n        os.kill(1, number)\n        print('PWNED', number)\n"
        "    except OSError:\n        pass"
    ),
    "who serves the call": (
        "import os\nparent = os.getppid()\nfor target in (parent, -os.getpgid(parent)):\n"
        "    try:\n        os.kill(target, 9)\n        print('PWNED', target)\n"
        "    except OSError as error:\n        print(error)"
    ),
    "limits of who serves the call": _try(
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))"
    ),
    "memory of who serves the call": _try("import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')"),
    "descriptors of who serves the call": _try("import os\nos.listdir(f'/proc/{os.getppid()}/fd')"),
    "files that others open": _call(
        "(fd := libc.inotify_init1(0)) >= 0 and libc.inotify_add_watch(fd, b'/usr', 0xFFF) >= 0"
    ),
    "priority of process 1": _try("import os\nos.setpriority(os.PRIO_PROCESS, 1, 5)"),
    # rights
    "setuid": _try("import os\nos.setuid(0)"),
    "setgroups": _try("import os\nos.setgroups([0])"),
    "unshare": _call("libc.unshare(0x10000000) == 0"),
    "setns": _try(
        "import ctypes, os\nfd = os.open('/proc/1/ns/mnt', 0)\n"
        "assert ctypes.CDLL(None).setns(fd, 0) == 0"
    ),
    "mount": _call("libc.mount(b't', b'/workspace', b'tmpfs', 0, None) == 0"),
    "remount": _call("libc.mount(None, b'/', None, 32 | 4096, None) == 0"),
    "chroot": _try("import os\nos.chroot('/workspace')"),
    "device": _try("import os\nos.mknod('disk', 0o60600, os.makedev(254, 0))"),
    "raw memory": _try("open('/dev/mem', 'rb')"),
    "terminal": _try("open('/dev/tty', 'r+b', buffering=0)"),
    "keyring": _call(f"libc.syscall(219 if {_ARM} else 250, 0, -3, 0, 0, 0) >= 0"),
    "bpf": _call(f"libc.syscall(280 if {_ARM} else 321, 0, None, 0) >= 0"),
    "io_uring": _call("libc.syscall(425, 1, ctypes.create_string_buffer(256)) >= 0"),
    "shared memory": _call("libc.shmget(0, 4096, 0o1600) >= 0"),
    "memory file": _try("import os\nos.memfd_create('x')"),
    "page faults of others": _call(f"libc.syscall(282 if {_ARM} else 323, 0) >= 0"),
    "kernel log": _call("libc.klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0"),
    "speed of the clock": _call("libc.adjtimex(ctypes.create_string_buffer(b'\\x01', 256)) >= 0"),
    "real time": _try("import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"),
    "capability of a file": _try(
        "import os\nopen('c', 'w')\n"
        "os.setxattr('c', 'security.capability', bytes([1, 0, 0, 2] + [0] * 16))"
    ),
    "core of a crash": (
        "import resource\n"
        "print('no' if resource.getrlimit(resource.RLIMIT_CORE) == (1, 1) else 'PWNED')"
    ),
    "memory of the zero device": _try(
        "import mmap, os\nm = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 27)\n"
        "for i in range(0, 1 << 27, 4096):\n    m[i] = 1"
    ),
    "clock": _try("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)"),
    "host name": _try("import socket\nsocket.sethostname('mine')"),
    "kernel setting": _try("open('/proc/sys/kernel/hostname', 'w').write('mine')"),
    "sysrq": _try("open('/proc/sysrq-trigger', 'w').write('b')"),
    "cgroups": _try("import os\nassert os.listdir('/sys/fs/cgroup')"),
    "raise a limit": _try(
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))"
    ),
    # files that others rely on
    "programs": _try("open('/usr/bin/attack', 'w')"),
    "standard library": _try(
        "import os\nopen(os.path.dirname(os.__file__) + '/json/__init__.py', 'a')"
    ),
    "loader": _try("open('/etc/ld.so.preload', 'w').write('/workspace/x.so')"),
    "root folder": _try("open('/attack', 'w')"),
    "devices": _try("open('/dev/attack', 'w')"),
}

SHELL_ATTACKS = {
    "setuid program": "su -c 'echo PWNED' </dev/null; mount -t tmpfs t /mnt && echo PWNED",
    "mode of a program": (
        "cp /bin/sh mine && chmod u+s mine && ./mine -c '[ $(id -u) = 0 ] && echo PWNED'"
    ),
    "hard link": "ln /usr/bin/env hard && echo PWNED",
}

# What a limit has to end: (code, key of the limit, or None if the code itself fails first).
GREEDY = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "wall_s",
    ),
    "thread bomb": (
        "import threading, time\nwhile True:\n"
        "    threading.Thread(target=time.sleep, args=(99,)).start()",
        None,
    ),
    "memory": ("x = []\nwhile True:\n    x.append(bytearray(1 << 22))", None),
    "memory of many": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        break\n"
        "x = bytearray(60 << 20)\ntime.sleep(9)",
        "memory_mb",
    ),
    "page tables": (
        "import mmap\nm = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)\n"
        "sum(m[i] for i in range(0, 1 << 40, 2 << 20))\nprint('PWNED')",
        "memory_mb",
    ),
    "socket buffers": (
        "import os, socket, time\nos.fork()\nkept = []\nwhile len(kept) < 120:\n"
        "    kept.append(socket.socketpair())\n    for one in kept[-1]:\n"
        "        one.setblocking(False)\n"
        "        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)\n"
        "        try:\n            while True:\n                one.send(bytes(1 << 16))\n"
        "        except BlockingIOError:\n            pass\ntime.sleep(99)",
        "memory_mb",
    ),
    "pipe buffers": (
        "import os, time\nwhile True:\n    try:\n        if os.fork() == 0:\n"
        "            break\n    except OSError:\n        break\n"
        "data, kept = bytes(1 << 16), []\ntry:\n    while True:\n"
        "        kept.append(os.pipe())\n        os.set_blocking(kept[-1][1], False)\n"
        "        os.write(kept[-1][1], data)\n        os.close(kept[-1][1])\n"
        "except OSError:\n    pass\ntime.sleep(99)",
        "memory_mb",
    ),
    "processor time of children nobody waits for": (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n"
        "    child = os.fork()\n    if child == 0:\n        until = time.monotonic() + 0.01\n"
        "        while time.monotonic() < until: pass\n        os._exit(0)\n"
        "    try:\n        os.waitpid(child, 0)\n    except ChildProcessError:\n        pass",
        "cpu_s",
    ),
    "disk": (
        "with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))",
        None,
    ),
    "sparse file": (
        "import os\nos.truncate(os.open('s', os.O_CREAT | os.O_WRONLY), 1 << 40)",
        None,
    ),
    "processor time": ("while True: pass", "cpu_s"),
    "waiting": (
        "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
        "time.sleep(99)",
        "wall_s",
    ),
}
