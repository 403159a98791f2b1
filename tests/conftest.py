"""What every test process shares: one torch thread, hypothesis examples that repeat, and a
collection that leaves little to do.

Tests run several at a time on small machines. One torch thread per process keeps them from fighting
for the cores, and makes CPU results a function of the inputs alone.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Read by torch and its math libraries at import, also in the child processes a test starts.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["MKL_CBWR"] = "AUTO,STRICT"  # as areal sets it, and here before any product
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Else each process that compiles starts others that import torch, to compile in at once.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Vector instructions are torch's to test, and take a quarter longer to compile.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
# No worker of Ray is killed because others use the memory of this machine.
os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 (as Ray spells it)

# What is collected stays, and would be searched for garbage again and again. And to rewrite its
# assertions takes longer than all of its imports: that is kept for the next process.
gc.disable()
_writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False


def pytest_collection_finish():
    sys.dont_write_bytecode = _writes_no_bytecode
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # once the others have deselected
def pytest_collection_modifyitems(config, items):
    """Slow tests first, an equal share for each process: at the end short ones fill the gaps."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    ordered = []
    for left in range(workers, 0, -1):  # xdist hands out runs of equal length
        room, share = len(slow + fast) // left, len(slow) // left
        ordered += slow[:share] + fast[: room - share]
        del slow[:share], fast[: room - share]
    items[:] = ordered


def pytest_configure(config):
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # it distributes tests, and runs none
    import torch  # after its variables

    if not torch.cuda.is_available():
        # The tests of kernels run them in Triton's interpreter. Triton reads this when it is
        # imported, which some libraries do, so it must be there before any of them.
        os.environ["TRITON_INTERPRET"] = "1"


# Wall-clock limits per example fail on a busy machine for no fault of the code.
settings.register_profile(
    "areal", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("areal")


@pytest.fixture(scope="module")
def forked_children():
    """For a module's tests of what servers, ranks and workers compute: see forked_children.py."""
    from forked_children import fork_children

    with fork_children():
        yield
