"""Does a run grow? Memory of its controller and its server over thousands of steps.

    python benchmark/memory.py --steps 2000 --json FILE

Trains the arithmetic recipe, made tiny, with evaluations and recover points as usual, and looks
every few seconds at the anonymous memory (what the process has allocated itself; files it maps and
memory it shares are not counted) of both processes. The growth is that from a tenth of the steps,
when everything is warm, to the end: the median of the samples of one twentieth of the steps each.
The exit code is 1 when one of them grew by more than `--bound` MiB.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from report import Row, print_table, write_json

from areal.cli.demo import make_model, recipe_path
from areal.run.database import open_read_only
from areal.sandbox.watch import descendants

PROCESSES = ("controller", "server")
SMALL = (
    "trial_name=memory",
    "total_train_epochs=1000",
    "train_dataset.batch_size=8",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=6",
    "valid_dataset.dataset_kwargs={num_rows: 16}",
)
MAX_KEPT = 100  # samples in the report
_ANONYMOUS = re.compile(r"^Anonymous:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    step: int  # steps done
    controller: float  # MiB
    server: float


def watch(steps: int, every_s: float, folder: Path) -> Iterator[Sample]:
    """Trains, and looks meanwhile."""
    make_model(folder / "model")
    command = [sys.executable, "-m", "areal.cli.main", "train", recipe_path("arithmetic_grpo.yaml")]
    command += [f"cluster.fileroot={folder}", f"actor.path={folder / 'model'}", *SMALL]
    command += [f"total_train_steps={steps}"]
    with open(folder / "console.log", "w") as log:
        run = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while run.poll() is None:
            if (sample := look(run.pid, folder / "arithmetic" / "memory" / "run.db")) is not None:
                yield sample
            time.sleep(every_s)
    finally:
        run.kill()
        run.wait()
    if run.returncode != 0:
        last_lines = (folder / "console.log").read_text()[-2000:]
        raise RuntimeError(f"the run ended with exit code {run.returncode}: {last_lines}")


def look(command: int, database: Path) -> Sample | None:
    """None before the first step, and while the run ends. `command` is the supervisor."""
    with suppress(OSError, StopIteration):
        server = next(pid for pid in descendants(command) if _is_server(pid))
        if step := _steps_done(database):
            return Sample(step, _anonymous_mib(_parent(server)), _anonymous_mib(server))
    return None


def _parent(pid: int) -> int:
    """The controller has started its server."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def _is_server(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3:4] == [b"serve"]


def _steps_done(database: Path) -> int:
    if not database.exists():
        return 0
    with closing(open_read_only(database)) as connection:
        return connection.execute("SELECT count(*) FROM steps WHERE step >= 0").fetchone()[0]


def _anonymous_mib(pid: int) -> float:
    found = _ANONYMOUS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    if found is None:  # it has just ended
        raise ProcessLookupError(pid)
    return int(found[1]) / 1024


def growth(samples: list[Sample], steps: int) -> list[Row]:
    window = steps / 20
    early = [sample for sample in samples if 0 <= sample.step - steps / 10 <= window]
    late = [sample for sample in samples if sample.step >= steps - window]
    if not early or not late:
        raise RuntimeError(f"{len(samples)} samples of {steps} steps are too few: lower --every")
    rows = []
    for process in PROCESSES:
        before, after = (
            statistics.median(getattr(sample, process) for sample in part) for part in (early, late)
        )
        rows += [
            Row(f"{process}_warm", before, "MiB"),
            Row(f"{process}_end", after, "MiB"),
            Row(f"{process}_growth", after - before, "MiB"),
        ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--bound", type=float, default=64.0, help="MiB of growth that are too much")
    parser.add_argument("--json", metavar="FILE", help="where to write the report")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-memory-") as folder:
        samples = list(watch(args.steps, args.every, Path(folder)))
    rows = [Row("steps", args.steps, ""), *growth(samples, args.steps)]
    print_table([*rows, Row("bound", args.bound, "MiB")])
    if args.json:
        kept = samples[:: 1 + len(samples) // MAX_KEPT]
        write_json(args.json, rows, bound=args.bound, samples=[asdict(s) for s in kept])
    too_much = [row for row in rows if row.name.endswith("_growth") and row.value > args.bound]
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
