"""ChildProcess: readiness, errors that show the cause, and no orphan, not even after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from areal.utils.child_process import ChildProcess

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def python(code, **kw):
    return ChildProcess([sys.executable, "-S", "-c", code], name="toy", **kw)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_ready_line_then_terminate():
    child = python(SLEEP)
    assert child.wait_ready(timeout_s=10) == "up"
    assert child.poll() is None
    assert os.getpgid(child.pid) == child.pid
    assert child.terminate() == -signal.SIGTERM
    assert child.terminate() == -signal.SIGTERM  # again is fine
    assert not is_running(child.pid)


def test_lines_before_the_ready_line_are_passed_over():
    child = python("print('noise'); print('port 7')")
    line = child.wait_ready(timeout_s=10, is_ready=lambda line: line.startswith("port"))
    assert line == "port 7"
    child.terminate()


def test_early_end_shows_code_and_stderr():
    child = python("import sys; sys.stderr.write('no such model\\n'); sys.exit(3)")
    with pytest.raises(RuntimeError, match=r"toy .*exit code 3(.|\n)*no such model"):
        child.wait_ready(timeout_s=10)
    with pytest.raises(RuntimeError, match="exit code 3"):
        child.raise_if_ended()


def test_not_ready_in_time():
    child = python("import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="not ready within 0.1 s"):
        child.wait_ready(timeout_s=0.1)
    child.terminate()


def test_the_last_lines_are_shown_and_the_log_has_all(tmp_path):
    log = tmp_path / "logs" / "toy.log"
    child = python("import sys\nfor i in range(200): print(i, file=sys.stderr)", log_path=log)
    wait_until(lambda: child.poll() is not None)
    with pytest.raises(RuntimeError) as caught:
        child.raise_if_ended()
    assert str(caught.value).endswith(
        f"its last lines of stderr: 195 | 196 | 197 | 198 | 199 (all of it: {log})"
    )
    assert log.read_text().split() == [str(i) for i in range(200)]


def test_without_a_log_the_last_lines_are_shown():
    child = python("import sys\nfor i in range(200): print(i, file=sys.stderr)")
    assert child.wait(900) == 0
    with pytest.raises(RuntimeError) as caught:
        child.raise_if_ended()
    assert str(caught.value).splitlines()[1:] == [str(i) for i in range(150, 200)]


def test_stubborn_child_is_killed():
    child = python("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    child.wait_ready(timeout_s=10)
    assert child.terminate(grace_s=0.1) == -signal.SIGKILL
    assert "SIGKILL" in child.describe_end()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_dead_child_leaves_ends_with_it(signum):
    sleeper = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    child = python(
        "import subprocess, sys, time\n"
        f"grandchild = subprocess.Popen([sys.executable, '-S', '-c', {sleeper!r}],"
        " stdout=subprocess.PIPE)\n"
        "grandchild.stdout.readline()\n"
        "print(grandchild.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    grandchild = int(child.wait_ready(timeout_s=10))
    assert is_running(grandchild)
    os.kill(child.pid, signum)
    assert child.wait(900) == -signum
    wait_until(lambda: not is_running(grandchild))


def test_environment_is_added():
    child = python(
        "import os; print(os.environ['TOY'], os.environ['PATH'] != '')", env={"TOY": "1"}
    )
    assert child.wait_ready(timeout_s=10) == "1 True"
    child.terminate()


def test_missing_program_raises_in_the_caller():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        ChildProcess(["/no-such-program"], name="toy")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the death signal is Linux's")
def test_child_outlives_the_thread_that_asked_for_it():
    born = []
    thread = threading.Thread(target=lambda: born.append(python(SLEEP)))
    thread.start()
    thread.join()
    born[0].wait_ready(timeout_s=10)
    time.sleep(0.05)
    assert born[0].poll() is None
    born[0].terminate()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the death signal is Linux's")
def test_child_dies_with_a_killed_parent():
    parent_code = (
        "import sys, time\n"
        "from areal.utils.child_process import ChildProcess\n"
        f"child = ChildProcess([sys.executable, '-S', '-c', {SLEEP!r}], name='toy')\n"
        "child.wait_ready(timeout_s=10)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE)
    child_pid = int(parent.stdout.readline())
    assert is_running(child_pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child_pid))


def test_wait_until_it_answers():
    child = python(SLEEP)
    answers = iter([False, False, True])
    child.wait_until(lambda: next(answers), timeout_s=10, every_s=0.01)
    with pytest.raises(RuntimeError, match="not ready within 0.05 s"):
        child.wait_until(lambda: False, timeout_s=0.05, every_s=0.01)
    child.terminate()
    child = python("import sys; sys.exit('no model')")
    with pytest.raises(RuntimeError, match="(?s)exit code 1.*no model"):
        child.wait_until(lambda: False, timeout_s=10, every_s=0.01)


# A launcher as inference servers have one: its engine is in a session of its own and deaf.
LAUNCHER = (
    "import subprocess, sys, time\n"
    "deaf = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n'\n"
    f"engine = subprocess.Popen([sys.executable, '-S', '-c', deaf + {SLEEP!r}],"
    " stdout=subprocess.PIPE, start_new_session=True)\n"
    "engine.stdout.readline()\n"
    "print(engine.pid, flush=True)\n"
)
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards are Linux's")


@linux
def test_nothing_outlives_a_guarded_child_that_is_terminated():
    child = python(LAUNCHER + "time.sleep(60)", is_guarded=True)
    engine = int(child.wait_ready(timeout_s=900))
    assert is_running(engine)
    assert child.terminate() == -signal.SIGTERM
    assert not is_running(engine)


@linux
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)]
)
def test_nothing_outlives_a_guarded_child_that_ends(end, code):
    child = python(LAUNCHER + end, is_guarded=True)
    engine = int(child.wait_ready(timeout_s=900))
    assert child.wait(900) == code
    assert not is_running(engine)


@linux
def test_a_guarded_child_that_ignores_sigterm_is_killed():
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    child = python(deaf + LAUNCHER + "time.sleep(900)", is_guarded=True)
    engine = int(child.wait_ready(timeout_s=900))
    assert child.terminate() == -signal.SIGKILL
    assert not is_running(engine)


@linux
def test_nothing_of_a_guarded_child_outlives_a_killed_parent():
    parent_code = (
        "import sys, time\n"
        "from areal.utils.child_process import ChildProcess\n"
        f"child = ChildProcess([sys.executable, '-S', '-c', {LAUNCHER + 'time.sleep(900)'!r}],"
        " name='toy', is_guarded=True)\n"
        "print(child.pid, child.wait_ready(timeout_s=900), flush=True)\n"
        "time.sleep(900)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE)
    guard, engine = map(int, parent.stdout.readline().split())
    assert is_running(guard) and is_running(engine)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(engine) and not is_running(guard), timeout_s=900)


@linux
def test_nothing_outlives_a_guard_that_is_told_twice():
    """The kernel tells it of each thread of its parent that ends."""
    for _ in range(5):
        child = python(LAUNCHER + "time.sleep(900)", is_guarded=True)
        engine = int(child.wait_ready(timeout_s=900))
        while child.poll() is None:
            os.kill(child.pid, signal.SIGTERM)
        wait_until(lambda engine=engine: not is_running(engine), timeout_s=30)


@linux
def test_a_guard_that_is_asked_for_its_stacks_stays():
    child = python(LAUNCHER + "time.sleep(900)", is_guarded=True)
    child.wait_ready(timeout_s=900)
    os.kill(child.pid, signal.SIGUSR1)
    assert child.terminate() == -signal.SIGTERM


def test_a_guarded_child_is_as_any_other():
    child = python("import sys; sys.stderr.write('no such model\\n'); sys.exit(3)", is_guarded=True)
    with pytest.raises(RuntimeError, match=r"toy .*exit code 3(.|\n)*no such model"):
        child.wait_ready(timeout_s=900)
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        ChildProcess(["/no-such-program"], name="toy", is_guarded=True)


NOISY = """
import sys
def say(*lines):
    for line in lines:
        print(line, file=sys.stderr)
say("ImportError: an optional package is missing")
say(*(f"loading shard {i}" for i in range(80)))
say("(EngineCore pid=7) ERROR [core.py:700] Traceback (most recent call last):")
say("(EngineCore pid=7) ERROR [core.py:700]     except KeyError:")
say("(EngineCore pid=7) ERROR [core.py:700] ValueError: 28 heads do not divide by 3")
say("RuntimeError: Engine core initialization failed. See root cause above.")
say(*(f"nanobind: leaked {i} instances!" for i in range(NUM_LEAKS)))
raise SystemExit(1)
"""


@pytest.mark.parametrize("num_leaks", [40, 400])
@pytest.mark.parametrize("has_log", [True, False])
def test_the_cause_is_shown_though_noise_follows_it(tmp_path, num_leaks, has_log):
    code = NOISY.replace("NUM_LEAKS", str(num_leaks))
    log = tmp_path / "log" if has_log else None
    child = ChildProcess([sys.executable, "-c", code], name="server", log_path=log)
    with pytest.raises(RuntimeError) as error:
        child.wait_ready(timeout_s=900)
    text = str(error.value)
    assert "ValueError: 28 heads do not divide by 3" in text
    assert "RuntimeError: Engine core initialization failed" in text
    assert text.index("28 heads") < text.index("Engine core") < text.index("leaked")
    before_the_tail = text.partition("; its last")[0]
    assert "ImportError" not in text and "except KeyError" not in before_the_tail


def test_hostile_lines_stay_small(tmp_path):
    """Megabytes without a line break, bytes that are no text, and an error in their midst."""
    code = (
        "import sys; w = sys.stderr.buffer.write\n"
        "w(b'ValueError: \\xff\\xed\\xa0\\x80 ' + b'x' * (3 << 20) + b'\\n')\n"
        "w(b'\\n'.join(b'FATAL ' + bytes([65 + i]) * (1 << 16) for i in range(20)))\n"
        "raise SystemExit(3)\n"
    )
    log = tmp_path / "log"
    child = ChildProcess([sys.executable, "-c", code], name="server", log_path=log)
    with pytest.raises(RuntimeError) as error:
        child.wait_ready(timeout_s=900)
    text = str(error.value)
    assert "exit code 3; its first errors: ValueError: " in text
    assert len(text.encode()) < 50_000
    assert log.read_text(encoding="utf-8").count("x") == 3 << 20  # the log has all of it
