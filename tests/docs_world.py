"""Runs documentation: the blocks of a page, in order, in a folder that looks like a checkout.

    world = World(tmp_path)            # examples/, a tiny model; `areal`, `python`, `make` on PATH
    for block in read_blocks(page):
        world.run(block)               # writes titled files, runs bash, executes Python

A block with `title="name"` is written to that file. Training is real but small: the `areal` and
`python` of that folder call `run_program`, which adds overrides (few steps, few short samples) to
any command that trains from a YAML file. It runs in a process forked from one that has imported
torch, and so do its servers and workers; `python -c` is started from nothing. `make` is a dry run:
the target must exist. Only these are not run: `git clone`, `pip install`, and a block under a
comment `not run: REASON`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import yaml
from docs_programs import Programs
from forked_children import FORKED, fork_children_of_this_process, run_python, write_program

ROOT = Path(__file__).resolve().parents[1]
CHECK_ONLY = "AREAL_DOCS_CHECK_ONLY"  # set: `areal train` becomes `areal check`
GRPO = "examples/math/arithmetic_grpo.yaml"
LEARNS = (  # by test_recipes_learn.py, from the warm start: page, how a command begins, steps
    ("quickstart.md", f"{GRPO} actor.optimizer.lr=5e-4", 16),
    ("quickstart.md", f"{GRPO} reward_fn=my_rewards.exact_reward_fn", 10),
    ("howto/reward.md", f"{GRPO} reward_fn=my_rewards.close_reward_fn", 10),
    ("howto/workflow.md", f"{GRPO} workflow=second_chance.SecondChance", 14),
    ("howto/agent.md", f"{GRPO} workflow=counting_agent.CountingAgent", 8),
    ("howto/algorithm.md", f"{GRPO} actor.eps_clip_higher=null", 24),
    ("howto/dataset.md", "tens.yaml", 48),
    ("algorithms/ppo.md", "examples/multi_turn_math/arithmetic_ppo.yaml", 12),
    ("algorithms/preference.md", "examples/alignment/arithmetic_rw.yaml", 48),
    ("algorithms/preference.md", "examples/alignment/arithmetic_dpo.yaml", 20),
    ("algorithms/preference.md", "examples/alignment/arithmetic_ipo.yaml", 20),
)
FENCE = re.compile(r"^```(\w*)[^\S\n]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)  # MkDocs puts the file there
TITLE = re.compile(r'title="([^"]+)"')
DOCUMENTED_PORT = "8600"  # pages serve there; the test on a port that is free
NEEDS_A_NETWORK = ("git clone", "pip install")
BLOCK_TIMEOUT_S = 600
WARM_STARTS = (
    "code/sft",
    "search/sft",
    "service/sft",
    "terminal/sft",
    "tir/sft",
)  # of docs/examples/
LOOP = "examples/math/rl_loop.py"
PR_SET_PDEATHSIG = 1
DONE = "@@ block"  # begins the line that ends a block, with its exit code


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # of its first line of content
    language: str
    title: str | None
    text: str
    not_run: str | None  # why
    is_script: bool  # a later command of the page runs it, so it is not imported

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def trains(self) -> bool:
        return self.language == "bash" and bool(
            re.search(r"^(areal (train|demo|serve|launch ray)|python )", self.text, re.MULTILINE)
        )


def read_blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(source):
        language, info, text = match.groups()
        text = SNIPPET.sub(lambda m: (ROOT / m[1]).read_text(encoding="utf-8").rstrip(), text)
        title = TITLE.search(info)
        why = NOT_RUN.search(source[: match.start()])
        blocks.append(
            Block(
                page=page,
                line=source.count("\n", 0, match.start()) + 2,
                language=language,
                title=title and title[1],
                text=text,
                not_run=why[1] if why else _skip_rule(language, text),
                is_script=title is not None and f"python {title[1]}" in source,
            )
        )
    return blocks


def _skip_rule(language: str, text: str) -> str | None:
    if language != "bash":
        return None
    return next((f"`{words}` needs a network" for words in NEEDS_A_NETWORK if words in text), None)


class World:
    """A folder to run a page in, with one shell that lives from its first block to its last."""

    def __init__(self, folder: Path, *, check_only: bool = False) -> None:
        self.folder = folder
        self._module = types.ModuleType("docs_page")
        sys.modules["docs_page"] = self._module
        self._programs = Programs(run_program)
        self._env = {
            **os.environ,
            **self._programs.env,
            **({CHECK_ONLY: "1"} if check_only else {}),
        }
        self._shell: subprocess.Popen[str] | None = None
        self._port = str(_free_port())
        shutil.copytree(ROOT / "examples", folder / "examples")
        _make_models(folder / "runs" / "demo")
        _make_programs(folder / ".venv" / "bin")
        forked = folder / ".venv" / "forked"
        forked.mkdir()
        self._env[FORKED] = str(write_program(forked))
        self._env["PATH"] = f"{folder / '.venv' / 'bin'}{os.pathsep}{self._env['PATH']}"

    def run(self, block: Block) -> str:
        """The output of a bash block; raises AssertionError with place and output on failure."""
        if block.title is not None:
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        if block.not_run is not None:
            return ""
        if block.language == "python":
            self._run_python(block)
        elif block.language == "bash":
            return self._run_bash(block)
        return ""

    def _run_python(self, block: Block) -> None:
        code = compile(block.text, block.place, "exec")
        if block.title is None:
            exec(code, self._module.__dict__)
        elif not block.is_script:
            importlib.invalidate_caches()
            module = block.title.removesuffix(".py").replace("/", ".")
            sys.modules.pop(module, None)
            importlib.import_module(module)

    def _run_bash(self, block: Block) -> str:
        if self._shell is None:
            self._shell = subprocess.Popen(
                ["bash"],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            self._say(f"set -eo pipefail\ntrap 'code=$?; echo; echo \"{DONE} $code\"' EXIT\n")
        # The empty line: what the block printed last may lack its line end.
        self._say(f"{block.text.replace(DOCUMENTED_PORT, self._port)}\necho; echo '{DONE} 0'\n")
        output, code = self._listen(self._shell)
        assert code == "0", f"{block.place} failed with exit code {code}:\n{block.text}\n{output}"
        return output

    def _say(self, text: str) -> None:
        self._shell.stdin.write(text)
        self._shell.stdin.flush()

    def _listen(self, shell: subprocess.Popen[str]) -> tuple[str, str]:
        deadline = threading.Timer(BLOCK_TIMEOUT_S, self._kill)
        deadline.start()
        lines = []
        try:
            for line in shell.stdout:
                if line.startswith(DONE):
                    return "".join(lines), line.removeprefix(DONE).strip()
                lines.append(line)
        finally:
            deadline.cancel()
        return "".join(lines), f"none: no end within {BLOCK_TIMEOUT_S} s"

    def close(self) -> None:
        sys.modules.pop("docs_page", None)
        self._programs.close()
        if self._shell is not None:
            self._kill()
            self._shell.stdin.close()
            self._shell.stdout.close()
            self._shell.wait(timeout=10)

    def _kill(self) -> None:
        """The shell and what it left in the background: they are one process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _make_models(demo: Path) -> None:
    """The models `areal demo` and warm starts leave behind; untrained ones are as good here."""
    from areal.cli.demo import make_model

    make_model(demo / "tiny_model")
    for run in ("arithmetic/sft", "arithmetic/grpo", *WARM_STARTS):
        shutil.copytree(demo / "tiny_model", demo / run / "model")


def _make_programs(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "activate").write_text("# the world is active already\n")
    # By their whole paths: these programs come first on PATH and must not find themselves.
    python = f'"{sys.executable}"'
    forked = f'exec {python} -I -S "{ROOT}/tests/docs_client.py"'
    programs = {
        "areal": f'{forked} areal "$@"',
        "python": f'case "$1" in *.py) {forked} python "$@" ;; *) exec {python} "$@" ;; esac',
        "make": f'exec "{shutil.which("make")}" --directory "{ROOT}" --dry-run "$@"',
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


def small_overrides(tree: dict) -> list[str]:
    """Two steps of a few short samples, for any shipped recipe."""
    overrides = ["total_train_steps=2", "train_dataset.batch_size=4"]
    if tree.get("trainer", "ppo") == "ppo":
        overrides += ["gconfig.n_samples=2", "gconfig.max_new_tokens=4"]
        overrides += ["actor.ppo_n_minibatches=1"]
    if (tree.get("valid_dataset") or {}).get("path") == "arithmetic":
        overrides += ["valid_dataset.dataset_kwargs.num_rows=4"]
    data = tree.get("train_dataset") or {}
    if data.get("path") == "arithmetic" and "num_rows" not in data.get("dataset_kwargs", {}):
        overrides += ["train_dataset.dataset_kwargs.num_rows=64"]  # to draw all takes longer
    if "recover" in tree:
        overrides += ["recover.freq_steps=1"]
    return overrides


def run_program(argv: list[str]) -> int:
    """`areal ...` or `python file.py ...`, in this process."""
    if argv[0].startswith("-"):  # a server or worker of such a program
        return run_python(argv)
    program, *args = argv
    _end_with_parent()
    fork_children_of_this_process()
    # A page's own modules must be found as for a user, not because this test has them on its path.
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(os.getcwd())]
    trains = (
        program == "python" or args[:1] in (["train"], ["demo"]) or args[:2] == ["launch", "ray"]
    )
    recipe = next((arg for arg in args if arg.endswith(".yaml")), None)
    if args[:1] == ["demo"]:
        recipe = str(ROOT / "examples" / "math" / "arithmetic_grpo.yaml")
    if trains and recipe is not None:
        if os.environ.get(CHECK_ONLY) and args[:1] != ["demo"]:
            return _areal(["check", *args[1:]])
        args += small_overrides(yaml.safe_load(Path(recipe).read_text(encoding="utf-8")))
    if program == "areal":
        return _areal(args)
    if LOOP in args:
        args += ["--steps", "2", "--prompts", "4", "--samples", "2"]
    sys.argv = args
    sys.path.insert(0, str(Path(args[0]).absolute().parent))
    runpy.run_path(args[0], run_name="__main__")
    return 0


def _end_with_parent() -> None:
    """A killed test takes its shell along, and the shell what it runs, also in the background."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _areal(args: list[str]) -> int:
    from areal.cli.main import main

    return main(args)
