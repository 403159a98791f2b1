"""The demo's task by TRL's GRPOTrainer and by areal: seconds a step, accuracy, lines of the user.

    python benchmark/peers.py --trl-python TRL_ENV/bin/python [--steps 150] [--json FILE]

All arms start from the same warm-started model and train on the same prompts with the same reward,
64 x 8 samples of at most 10 tokens a step, one update, clip 0.2/0.28, AdamW at 1e-3 with a linear
schedule (areal's ends at a fifth, TRL's at 0). They run one after the other on this machine:

| arm                 | what it is                                                              |
|---------------------|-------------------------------------------------------------------------|
| `trl_N_threads`     | GRPOTrainer (peers_trl.py), synchronous, transformers' generate, N      |
|                     | threads of torch                                                        |
| `areal_staleness_N` | examples/math/arithmetic_grpo.yaml, the server in its own process       |

`step` is the mean over the steps after the first 8, without evaluations. `accuracy` is that of
greedy answers to the held-out rows after the last step. `lines` are those a user writes: the script
for TRL, the YAML for areal, without blank lines and comments. `ratio` is TRL's best step over
areal's best. Where `load_average` tells of other programs, compare arms of one run only.

TRL's environment needs trl, datasets and math-verify; areal itself is found by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from async_speedup import WARM_UP_STEPS, warm_start
from report import Row, print_table, write_json

from areal.cli.demo import GRPO_RECIPE, recipe_path
from areal.cli.train import load_config
from areal.dataset.arithmetic import get_arithmetic_rl_dataset
from areal.run.database import open_read_only, read_steps
from areal.run.paths import RunPaths
from areal.utils.chat_template import render_chats
from areal.utils.tokenizer import load_hf_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TRL_SCRIPT = Path(__file__).with_name("peers_trl.py")
ARMS = ("trl_2_threads", "trl_1_threads", "areal_staleness_2", "areal_staleness_0")


@dataclass(frozen=True, slots=True)
class Outcome:
    step_s: float
    accuracy: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="the Python of an environment with TRL", required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--model", help="model folder; default: the demo's, warm-started first")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}, those that are not measured")
    _check_trl(parser, args.trl_python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(args.model or warm_start(name))
        _write_data(folder, model)
        outcomes: dict[str, Outcome] = {}
        for arm in args.only:
            outcomes[arm] = _run(arm, folder, model, args)
            print(f"{arm}: {outcomes[arm]}", file=sys.stderr, flush=True)
    rows = _rows(outcomes)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def _check_trl(parser: argparse.ArgumentParser, python: str) -> None:
    try:
        found = subprocess.run([python, "-c", "import trl, datasets"], capture_output=True)
    except OSError as error:
        parser.error(f"--trl-python {python}: {error}")
    if found.returncode:
        parser.error(
            f"--trl-python {python} has no TRL: install trl, datasets and math-verify there "
            f"({found.stderr.decode().strip().splitlines()[-1]})"
        )


def _write_data(folder: Path, model: Path) -> None:
    """The rows as TRL's dataset: the text of the prompt that areal's template makes."""
    tokenizer = load_hf_tokenizer(str(model))
    (folder / "model").symlink_to(model.resolve())
    for split in ("train", "test"):
        rows = list(get_arithmetic_rl_dataset("arithmetic", split, tokenizer))
        chats = [row["messages"] for row in rows]
        texts = render_chats(tokenizer, chats, variables={"enable_thinking": False})
        lines = [
            json.dumps({"prompt": text, "answer": row["answer"]}) + "\n"
            for text, row in zip(texts, rows, strict=True)
        ]
        (folder / f"{split}.jsonl").write_text("".join(lines))


def _run(arm: str, folder: Path, model: Path, args: argparse.Namespace) -> Outcome:
    name, number, *_ = arm.replace("staleness_", "").split("_")
    if name == "trl":
        return _run_trl(args.trl_python, folder, args.steps, threads=int(number))
    return _run_areal(folder, model, args.steps, staleness=int(number))


def _run_trl(python: str, folder: Path, steps: int, *, threads: int) -> Outcome:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    command = [python, str(TRL_SCRIPT), str(folder), str(steps), str(threads)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.strip().splitlines()[-1])
    return Outcome(_mean_step_s(report["times"]), report["accuracy"])


def _run_areal(folder: Path, model: Path, steps: int, *, staleness: int) -> Outcome:
    options = [
        recipe_path(GRPO_RECIPE),
        f"cluster.fileroot={folder}",
        f"actor.path={model}",
        f"trial_name=staleness-{staleness}",
        f"total_train_steps={steps}",
        f"rollout.max_head_offpolicyness={staleness}",
        "evaluator.eval_before_train=false",
        f"evaluator.freq_steps={steps}",
    ]
    command = [sys.executable, "-m", "areal.cli.main", "train", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    with closing(open_read_only(RunPaths.of(load_config(options)).database)) as connection:
        times = [row["time"] for row in connection.execute("SELECT time FROM steps ORDER BY step")]
        (accuracy,) = [s["eval/reward"] for _, s in read_steps(connection) if "eval/reward" in s]
    return Outcome(_mean_step_s(times[:-1]), accuracy)  # the last step evaluates


def _mean_step_s(times: Sequence[float]) -> float:
    return (times[-1] - times[WARM_UP_STEPS - 1]) / (len(times) - WARM_UP_STEPS)


def _rows(outcomes: dict[str, Outcome]) -> list[Row]:
    rows = []
    for arm, outcome in outcomes.items():
        rows.append(Row(f"{arm}_step", outcome.step_s, "s"))
        rows.append(Row(f"{arm}_accuracy", outcome.accuracy, "greedy, held out"))
    best = {
        name: min((o.step_s for arm, o in outcomes.items() if arm.startswith(name)), default=None)
        for name in ("trl", "areal")
    }
    if best["trl"] and best["areal"]:
        rows.append(Row("ratio", best["trl"] / best["areal"], "x, TRL's best step over areal's"))
    recipe = Path(recipe_path(GRPO_RECIPE))
    rows.append(Row("trl_lines", _num_lines(TRL_SCRIPT), "of Python"))
    rows.append(Row("areal_lines", _num_lines(recipe), "of YAML"))
    rows.append(Row("load_average", os.getloadavg()[0], "of the last minute; this alone: 1 to 2"))
    return rows


def _num_lines(path: Path) -> int:
    """Without blank lines, comments and the docstring of a module."""
    text = path.read_text()
    if text.startswith('"""'):
        text = text.split('"""', 2)[2]
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


if __name__ == "__main__":
    sys.exit(main())
