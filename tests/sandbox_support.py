"""Whether this system lets anyone make a sandbox; where not, tests of sessions are skipped."""

from __future__ import annotations

import subprocess

import pytest

# Asked of other programs, not of areal: a fault of areal's own must not skip its tests.
_WAYS = (
    ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"),
    ("bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"),
)


def _works(command: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=300).returncode == 0
    except OSError:  # not there, or asked in a reward process, which imports tests too
        return False


needs_sandbox = pytest.mark.skipif(
    not any(map(_works, _WAYS)),
    reason="this system allows neither user namespaces nor bubblewrap",
)
