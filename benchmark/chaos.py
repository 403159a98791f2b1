"""kill -9 of a run's processes at random moments: every fault is survived, every ledger balances.

    python benchmark/chaos.py --faults 100 --seed 1 --jobs 2 --json FILE

Trains the arithmetic recipe, made tiny, again and again: some runs with training ranks in processes
of their own, some with rollout workers, some with neither. In each run processes are killed:

    server           the inference server: the run starts another, and goes on
    rollout worker   one of two: its episodes go to the other, and a new one joins
    rank             one of two: `areal train` starts the run again from its recover point
    controller       the training process: the same
    everything       all processes of the run at once: the same command is given again, by hand

A fourth of the faults come while the run still recovers from the one before. What makes a run good
is said in chaos_run.py; the exit code is 0 only if all runs are. The JSON file is written after
each run, and the runs it has are not repeated: the same command given again does what is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from chaos_run import ChaosError, ChaosRun, Fault, Result
from report import Row, print_table, write_json

from areal.cli.demo import make_model

EVERY_RUN_HAS = ("server", "controller", "everything")
# What a run is made of -> the overrides that make it so, and what can be killed there besides.
KINDS = {
    "workers": (("rollout.workers=2",), ("rollout worker",)),
    "ranks": (("actor.backend=archon:d2",), ("rank",)),
    "alone": ((), ()),
}
FAULTS_PER_RUN = 8
EARLY = 0.25  # share of faults that come while the run still recovers from the one before


def kind_of(seed: int, run: int) -> str:
    """Three runs in a row are one of each kind."""
    round_, place = divmod(run, len(KINDS))
    return random.Random(f"{seed}/round {round_}").sample(list(KINDS), len(KINDS))[place]


def plan(seed: int, run: int, num_faults: int) -> list[Fault]:
    draw = random.Random(f"{seed}/{run}")
    possible = EVERY_RUN_HAS + KINDS[kind_of(seed, run)][1]
    targets: list[str] = []
    while len(targets) < num_faults:
        targets += draw.sample(possible, len(possible))
    faults = []
    for target in targets[:num_faults]:
        if faults and draw.random() < EARLY:
            faults.append(Fault(target, 0, draw.uniform(0, 6.0), draw.random()))
        else:
            faults.append(Fault(target, draw.randint(1, 3), draw.uniform(0, 0.2), draw.random()))
    return faults


def survive(model: Path, seed: int, run: int, num_faults: int) -> list[Result]:
    folder = Path(tempfile.mkdtemp(prefix="areal-chaos-"))
    kind = kind_of(seed, run)
    try:
        results = ChaosRun(run, folder, model, plan(seed, run, num_faults), KINDS[kind][0]).go()
    except RuntimeError as error:
        where = f"run {run} ({kind}) of seed {seed} failed, its folder is {folder}"
        raise ChaosError(f"{where}: {error}") from error
    shutil.rmtree(folder)
    print(f"run {run} ({kind}): {num_faults} faults survived", flush=True)
    return results


def sizes(num_faults: int) -> Iterator[int]:
    """Faults of each run."""
    while num_faults > 0:
        yield min(num_faults, FAULTS_PER_RUN)
        num_faults -= FAULTS_PER_RUN


def read_results(path: str | None, seed: int) -> list[Result]:
    """Those of an earlier call with the same seed."""
    if path is None or not Path(path).exists():
        return []
    report = json.loads(Path(path).read_text())
    return [Result(**result) for result in report["faults"]] if report["seed"] == seed else []


def summary(results: list[Result]) -> list[Row]:
    rows = [
        Row("faults survived", len(results), ""),
        Row("of them while recovering", sum(result.is_early for result in results), ""),
    ]
    for target in sorted({result.target for result in results}):
        seconds = [result.recovery_s for result in results if result.target == target]
        rows.append(Row(f"{target}: faults", len(seconds), ""))
        rows.append(Row(f"{target}: recovery, median", statistics.median(seconds), "s"))
        rows.append(Row(f"{target}: recovery, longest", max(seconds), "s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--json", metavar="FILE", help="where results are kept")
    args = parser.parse_args()
    results = read_results(args.json, args.seed)
    done = {result.run for result in results}
    missing = [pair for pair in enumerate(sizes(args.faults)) if pair[0] not in done]
    failures = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        model = Path(folder) / "model"
        make_model(model)
        runs = [pool.submit(survive, model, args.seed, *pair) for pair in missing]
        for ended in as_completed(runs):
            if ended.cancelled():
                continue
            error = ended.exception()
            if error is not None:
                pool.shutdown(wait=False, cancel_futures=True)  # those under way go to their end
                if not isinstance(error, ChaosError):
                    raise error
                failures.append(error)
                print(error, flush=True)
                continue
            results = sorted([*results, *ended.result()], key=lambda result: result.run)
            if args.json:
                faults = [asdict(result) for result in results]
                write_json(args.json, summary(results), seed=args.seed, faults=faults)
    if not failures:
        print_table(summary(results))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
