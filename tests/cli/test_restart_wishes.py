"""Which ends of a run its parent is told not to repeat: a full disk is, a broken network is not."""

from __future__ import annotations

import errno
import os

import pytest

from areal.api.scheduler_api import WorkerFailedError
from areal.cli.train import tell_parent
from areal.rollout.failures import RolloutFailedError
from areal.run import restart
from areal.run.database import RunDatabaseError
from areal.utils.child_process import ProcessKilledError


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "wish"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), restart.STAY_DOWN),
        (PermissionError(errno.EACCES, "Permission denied"), restart.STAY_DOWN),
        (RunDatabaseError("database or disk is full"), restart.STAY_DOWN),
        (RolloutFailedError("9 of the last 10 groups failed"), restart.STAY_DOWN),
        # A fault of the rollout loop, which is another thread.
        (caused(RuntimeError("the loop stopped"), RunDatabaseError("full")), restart.STAY_DOWN),
        (caused(RuntimeError("the loop stopped"), OSError(errno.ENOSPC, "")), restart.STAY_DOWN),
        (WorkerFailedError("actor/1", "was ended by SIGKILL"), restart.COME_AGAIN),
        (ProcessKilledError("server was ended by SIGKILL"), restart.COME_AGAIN),
        # Of these only progress can tell.
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), b""),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), b""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), b""),
        (OSError("an exception of some HTTP library"), b""),
        (RuntimeError("something else"), b""),
    ],
    ids=repr,
)
def test_what_the_parent_is_told(error, wish):
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    restart.answer_to(writer)
    try:
        tell_parent(error)
        with open(reader, "rb", buffering=0) as said:
            assert (said.read(9) or b"") == wish
    finally:
        restart.answer_to(None)
        os.close(writer)
