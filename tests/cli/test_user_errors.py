"""Every mistake a user can make: one clear line, the right exit code, nothing half-written.

Each case runs the command in a process of its own on a small project and looks at how it ended:
exit code 2 (the user's mistake) or 1 (a fault of the world), one line `areal: error: ...` as the
last of stderr that names the key or file, no traceback, and no new file where none belongs.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Command, Ended, Program, python_m
from small_disk import fill, mounted
from tiny_run import SMALL, query
from trainer.test_kill_and_resume import steps_done

from areal.cli.demo import make_model, recipe_path
from areal.cli.train import FIRST_CONFIG

TESTS = Path(__file__).resolve().parents[1]
RECIPE = recipe_path("arithmetic_grpo.yaml")
SFT_RECIPE = recipe_path("arithmetic_sft.yaml")
numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny_model"
    make_model(folder)
    return folder


class Project:
    """A folder to work in, with a model, and runs below `runs`."""

    def __init__(self, folder: Path, model: Path, logs: Path) -> None:
        self.folder, self.logs = folder, logs
        self.runs = folder / "runs"
        self.run_dir = self.runs / "arithmetic" / "grpo"
        self.model = folder / "model"
        shutil.copytree(model, self.model)

    def start(self, *argv: str | Path, **env: str) -> Command:
        logs = self.logs / str(next(numbers))
        logs.mkdir()
        env = {"PYTHONPATH": str(TESTS), **env}
        return Command([str(a) for a in argv], cwd=self.folder, logs=logs, env=env)

    def __call__(self, *argv: str | Path, **env: str) -> Ended:
        return self.start(*argv, **env).wait()

    def grpo(self, *overrides: str, recipe: str | Path = RECIPE) -> list[str]:
        """`train` of the small GRPO recipe, its engine in the same process (quick to start)."""
        return [
            "train",
            str(recipe),
            f"cluster.fileroot={self.runs}",
            "actor.path=./model",
            *SMALL,
            "actor.weight_update_mode=direct",
            *overrides,
        ]

    def sft(self, *overrides: str) -> list[str]:
        small = (
            "total_train_steps=2",
            "train_dataset.batch_size=4",
            "train_dataset.dataset_kwargs={num_rows: 16}",
            "recover.freq_steps=1",
        )
        root = f"cluster.fileroot={self.runs}"
        return ["train", SFT_RECIPE, root, "actor.path=./model", *small, *overrides]

    def files(self) -> list[str]:
        """All but the byte code that Python keeps of the modules it imports."""
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*"))
        return sorted(str(path) for path in found if "__pycache__" not in path.parts)


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Project:
    folder = tmp_path / "project"
    folder.mkdir()
    logs = tmp_path / "logs"
    logs.mkdir()
    return Project(folder, model, logs)


def check_line(ended: Ended, code: int, *says: str) -> str:
    """The one line of an error, after the assertions that hold for every one."""
    assert ended.code == code, (ended.code, ended.err[-3000:])
    lines = [line for line in ended.err.splitlines() if line.startswith("areal: error:")]
    assert len(lines) == 1, ended.err[-3000:]
    assert ended.err.splitlines()[-1] == lines[0], ended.err[-3000:]
    assert "Traceback" not in ended.err, ended.err[-3000:]
    for text in says:
        assert text in lines[0], lines[0]
    return lines[0]


def refuse(project: Project, argv: list[str], *says: str, code: int = 2, **env: str) -> str:
    """The command ends with `code` and its line, and the project is as it was."""
    before = project.files()
    ended = project(*argv, **env)
    assert ended.out == ""
    line = check_line(ended, code, *says)
    assert project.files() == before
    assert len(line) < 700, line
    return line


# The command line and the file.


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trian"], "did you mean train?"),
        (["train"], "config"),
        (["train", "no_such.yaml"], "'no_such.yaml' does not exist"),
        (["train", "model"], "'model'"),
        (["train", "grpo.yaml", "total_train_steps"], "'total_train_steps'"),
        (["train", "grpo.yaml", "--seed=3"], "overrides have no dashes"),
        (["train", "grpo.yaml", "=3"], "'=3'"),
        (["train", "grpo.yaml", "seed.x=3"], "seed is 1, not a section"),
        (["train", "grpo.yaml", "actor.optimizer={lr: "], "actor.optimizer={lr: : not valid YAML"),
        (["train", "grpo.yaml", "seed=${nowhere}"], "nowhere"),
        (["check", "broken.yaml"], "broken.yaml:3: not valid YAML"),
        (["check", "latin1.yaml"], "'latin1.yaml' is not UTF-8"),
        (["check", "list.yaml"], "list.yaml: expected `key: value`"),
        (["check", "empty.yaml"], "actor.path"),
        (["serve"], "--model"),
        (["serve", "--model", "model", "--port", "http"], "--port"),
        (["demo", "--out"], "--out"),
    ],
)
def test_command_line_and_file(project, argv, says):
    shutil.copy(RECIPE, project.folder / "grpo.yaml")
    (project.folder / "broken.yaml").write_text("actor:\n  path: [1\ntrial_name: x\n")
    (project.folder / "latin1.yaml").write_bytes("trial_name: café\n".encode("latin-1"))
    (project.folder / "list.yaml").write_text("- 1\n- 2\n")
    (project.folder / "empty.yaml").touch()
    refuse(project, argv, says)


# Values and the world around the file: found before torch is loaded.


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.eps_clp=1"], "actor.eps_clp: unknown key; did you mean actor.eps_clip?"),
        (["lr=1"], "it belongs at actor.optimizer.lr"),
        (["seed=often"], "seed must be a whole number, got 'often'"),
        (["actor.optimizer.lr=fast"], "actor.optimizer.lr must be a number"),
        (["actor.optimizer.lr=-1"], "actor.optimizer.lr"),
        (["actor.dtype=float8"], "actor.dtype must be one of"),
        (["actor.optimizer=null"], "actor.optimizer must be set"),
        (["total_train_steps=0"], "total_train_steps must be at least 1, got 0"),
        (["trial_name=a/b"], "trial_name becomes a folder"),
        (["trainer=dpo2"], "trainer must be one of"),
        (
            ["trainer=grpo"],
            "got 'grpo'; that is an algorithm, chosen by keys of actor: trainer: ppo",
        ),
        (["gconfig.n_samples=0"], "gconfig.n_samples"),
        (["gconfig.max_new_tokens=5000"], "gconfig.max_new_tokens: 5000 leaves no room"),
        (["rollout.backend=sglang:d1"], "rollout.backend"),
        (["actor.backend=fsdp:d4p2"], "actor.backend"),
        (["recover.freq_steps=null"], "recover.freq_steps"),
        (["valid_dataset.path=./nowhere"], "valid_dataset.path: './nowhere' does not exist"),
        (["train_dataset.path=./nowhere"], "train_dataset.path: './nowhere' does not exist"),
        (["train_dataset.path=arithmetics"], "did you mean 'arithmetic'?"),
        (["train_dataset.path=./gsm8k"], "8 is more than the 3 rows of gsm8k/train.jsonl"),
        (["train_dataset.path=./gsm8k", "train_dataset.split=empty"], "gsm8k/empty.jsonl"),
        (["actor.path=./nowhere"], "actor.path: folder './nowhere' does not exist"),
        (["actor.path=./gsm8k"], "'./gsm8k' is not a model folder"),
        (["tokenizer_path=./gsm8k"], "tokenizer_path: './gsm8k' has no tokenizer"),
        (["reward_fn=gsm8"], "reward_fn: unknown name 'gsm8' (did you mean 'gsm8k'?)"),
        (["reward_fn=nowhere.score"], "reward_fn: there is no module 'nowhere'"),
        (["reward_fn=broken_parts.scores"], "reward_fn: module 'broken_parts'"),
        (["reward_fn=typo.score"], "typo.py:1"),
        (["workflow=rlv"], "workflow: unknown name 'rlv'"),
        (["workflow=broken_parts.NotThere"], "workflow: module 'broken_parts'"),
        (["dynamic_filter_fn=keep"], "dynamic_filter_fn: unknown name 'keep'"),
        (["cluster.fileroot=notes.txt"], "cluster.fileroot"),
        (["cluster.fileroot=notes.txt/runs"], "notes.txt"),
        (["cluster.fileroot=$NOT_SET/runs"], "cluster.fileroot uses $NOT_SET"),
        (["stats_logger.swanlab.mode=local"], "stats_logger.swanlab"),
    ],
)
def test_values_and_world(project, overrides, says):
    (project.folder / "gsm8k").mkdir()
    row = json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n"
    (project.folder / "gsm8k" / "train.jsonl").write_text(3 * row)
    (project.folder / "gsm8k" / "empty.jsonl").touch()
    (project.folder / "notes.txt").write_text("notes")
    (project.folder / "typo.py").write_text("def score(:\n")
    refuse(project, project.grpo(*overrides), says)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda model: (model / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (
            lambda model: cut(model / "model.safetensors", 20_000),
            "safetensors has 20000 bytes, expected",
        ),
        (lambda model: cut(model / "model.safetensors", 20), "model.safetensors is damaged"),
        (lambda model: cut(model / "model.safetensors", 0), "model.safetensors is damaged"),
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (lambda model: cut(model / "config.json", 50), "config.json is damaged"),
        (lambda model: (model / "config.json").write_text("[]"), "config.json is damaged"),
        (lambda model: edit_config(model, model_type="abacus"), "model_type 'abacus'"),
        (lambda model: edit_config(model, model_type=None), "config.json has no 'model_type'"),
        (lambda model: edit_config(model, hidden_size=None), "hidden_size"),
        (lambda model: edit_config(model, hidden_size=32), "do not fit this qwen3"),
        (lambda model: edit_config(model, num_attention_heads=3), "num_attention_heads"),
        (
            lambda model: cut(model / "tokenizer_config.json", 20),
            "no tokenizer at './model'",
        ),
        (lambda model: cut(model / "tokenizer.json", 200), "no tokenizer at './model'"),
        (lambda model: (model / "chat_template.jinja").unlink(), "has no chat template"),
    ],
)
def test_damaged_model(project, damage, says):
    damage(project.model)
    refuse(project, project.grpo("trial_name=t"), says)


def cut(file: Path, size: int) -> None:
    os.truncate(file, size)


def edit_config(model: Path, **changes) -> None:
    """Change keys of config.json; None takes one out."""
    config = {**json.loads((model / "config.json").read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    (model / "config.json").write_text(json.dumps(kept))


# Mistakes that only the objects a run is made of can find.


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["workflow_kwargs={judge: 1}"], "workflow_kwargs do not fit RLVRWorkflow"),
        (["workflow=broken_parts.NeedsMore"], "workflow_kwargs do not fit NeedsMore"),
        (["workflow=broken_parts.NoArguments"], "workflow_kwargs do not fit NoArguments"),
        (["workflow=broken_parts.not_a_workflow"], "is neither a RolloutWorkflow nor an agent"),
        (["workflow_kwargs={reward_kwargs: {patience: 1}}"], "workflow_kwargs"),
        (["workflow_kwargs={reward_kwargs: {max_workers: 0}}"], "max_workers must be at least 1"),
        (["reward_fn=raises_at_import.score"], "reward_fn: cannot import"),
        (["reward_fn=broken_parts.NUMBER"], "reward_fn"),
        (["dynamic_filter_fn=broken_parts.NUMBER"], "dynamic_filter_fn"),
        (["train_dataset.dataset_kwargs={rows: 5}"], "dataset_kwargs.rows: unknown"),
        (["train_dataset.dataset_kwargs={num_rows: 5}"], "fewer than one batch"),
        (["train_dataset.dataset_kwargs={num_rows: 0}"], "has no row in split 'train'"),
        (["train_dataset.dataset_kwargs={num_rows: many}"], "dataset_kwargs.num_rows"),
        (["train_dataset.dataset_kwargs={num_rows: -5}"], "dataset_kwargs.num_rows"),
        (["train_dataset.dataset_kwargs={operators: 7}"], "dataset_kwargs.operators"),
        (["train_dataset.dataset_kwargs={first_digits: [1]}"], "dataset_kwargs.first_digits"),
        (["train_dataset.split=training"], "split must be train"),
        (["train_dataset.max_length=1"], "raise max_length"),
        (["train_dataset.path=broken_parts.raising_loader"], "lie elsewhere"),
        (["train_dataset.path=broken_parts.NUMBER"], "broken_parts.NUMBER"),
        (["train_dataset.path=broken_parts.image_rows"], "have images, and workflow 'rlvr' reads"),
        (["train_dataset.path=./gsm8k"], "gsm8k/train.jsonl, line 2: not JSON"),
        (["train_dataset.path=./gsm8k", "train_dataset.split=latin1"], "latin1.jsonl, line 1"),
        (["train_dataset.path=./gsm8k", "train_dataset.split=columns"], "has no column answer"),
        (["train_dataset.path=./gsm8k", "train_dataset.split=none"], "no split 'none' in gsm8k"),
    ],
)
def test_parts_of_a_run(project, overrides, says):
    data = project.folder / "gsm8k"
    data.mkdir()
    (data / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' + "{torn\n" * 10)
    (data / "latin1.jsonl").write_bytes(b'{"question": "\xe9", "answer": "2"}\n' * 8)
    (data / "columns.jsonl").write_text('{"question": "1+1?"}\n' * 8)
    (project.folder / "raises_at_import.py").write_text("raise OSError('no licence')\nscore = 1\n")
    refuse(project, project.grpo(*overrides), says)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train_dataset.path=broken_parts.messageless_rows", "row 0 has no 'messages', found"),
        ("train_dataset.path=broken_parts.endless_prompts", "64 of the first 64 prompts have 256"),
        ("reward_fn=broken_parts.batch_reward", "broken_parts.batch_reward(prompts, completions"),
        ("reward_fn=broken_parts.reward_without_data", "the keyword 'messages'"),
        ("reward_fn=broken_parts.coroutine_reward", "is `async def`"),
        ("workflow=broken_parts.PlainAgent", "broken_parts.PlainAgent.run is a plain `def`"),
    ],
)
def test_what_every_episode_would_meet_is_said_before_anything_starts(project, override, says):
    refuse(project, project.grpo(override), says)


def test_a_port_for_agents_that_is_taken(project):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        overrides = ["workflow=broken_parts.ForwardingAgent", f"rollout.agent.port={port}"]
        refuse(project, project.grpo(*overrides), "rollout.agent.port", str(port))


def test_train_without_a_file(project):
    ended = project("train")
    check_line(ended, 2, "the config is missing", "FILE.yaml")
    (project.folder / "first.yaml").write_text(FIRST_CONFIG.replace("path/to/model", "./model"))
    rows = [json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) for n in range(32)]
    (project.folder / "rows.jsonl").write_text("\n".join(rows))
    assert FIRST_CONFIG in ended.err
    small = ["gconfig.max_new_tokens=8", "total_train_steps=1", "actor.weight_update_mode=direct"]
    done = project("train", "first.yaml", *small, f"cluster.fileroot={project.runs}")
    assert done.code == 0, done.err


def test_a_mistake_leaves_the_name_free(project):
    """After a refused start the corrected command runs, also without recover.mode=on."""
    refuse(project, project.sft("recover.mode=off", "train_dataset.max_length=1"), "max_length")
    assert project(*project.sft("recover.mode=off")).code == 0
    refuse(project, project.sft("recover.mode=off"), "holds an earlier run", "trial_name")


# What goes wrong while a run goes on: the cause is in the last line, and the run stops soon.


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["reward_fn=broken_parts.raising_reward"], "ZeroDivisionError: the judge is out of order"),
        (["reward_fn=broken_parts.text_reward"], "a reward must be a number, got 'good'"),
        (
            [
                "reward_fn=broken_parts.hanging_reward",
                "workflow_kwargs={reward_kwargs: {timeout_seconds: 0.1, max_retries: 1}}",
            ],
            "hanging_reward did not return within 0.1 s",
        ),
        (["dynamic_filter_fn=broken_parts.raising_filter"], "KeyError: 'difficulty'"),
        (["workflow=broken_parts.ReturnsText"], "an answer"),
    ],
)
def test_broken_episodes_stop_the_run(project, overrides, says):
    line = check_line(project(*project.grpo(*overrides)), 1, "max_failure_ratio", says)
    assert len(line) < 700, line
    assert_no_leftovers(project)
    assert "Traceback" in (project.run_dir / "logs" / "main.log").read_text()


def assert_no_leftovers(project: Project) -> None:
    """No temporary sibling of a file or folder."""
    assert not [name for name in project.files() if ".tmp-" in name or ".deleting-" in name]


# Going on with a run.


def test_recover_with_another_config(project):
    assert project(*project.sft()).code == 0
    config = project.runs / "arithmetic" / "sft" / "config.yaml"
    text = config.read_text()
    refuse(project, project.sft("seed=7"), "seed was 1, now 7", "trial_name")
    assert config.read_text() == text


def test_damaged_recover_point(project):
    assert project(*project.sft()).code == 0
    run_dir = project.runs / "arithmetic" / "sft"
    point = run_dir / "recover" / "step_1"
    for name in ("manifest.json", "actor/index.json"):
        file = point / name
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        refuse(project, project.sft("total_train_steps=3"), "step_1 is damaged", name, code=1)
        file.write_bytes(content)
    (point / "state.json").unlink()
    refuse(project, project.sft("total_train_steps=3"), "state.json: missing", code=1)
    assert project(*project.sft("total_train_steps=3", "recover.on_damage=previous")).code == 0
    assert query(run_dir, "SELECT count(*) FROM steps") == [(3,)]


def test_lost_ledger(project):
    """Refused with nothing changed, and not started again."""
    assert project(*project.grpo("total_train_steps=2")).code == 0
    run_dir = project.run_dir
    aside = project.folder / "aside"
    aside.mkdir()
    for name, says in (
        ("run.db", (f"step_1 does not belong to the run's ledger: {run_dir}/run.db is empty",)),
        ("recover", (f"{run_dir}/recover holds no recover point", f"remove {run_dir}")),
    ):
        (run_dir / name).rename(aside / name)
        refuse(project, project.grpo("total_train_steps=3"), *says, "trial_name", code=1)
        (aside / name).rename(run_dir / name)
    assert project(*project.grpo("total_train_steps=3")).code == 0
    assert project("ledger", run_dir).code == 0


def test_run_in_use(project):
    hold = (
        "import sys\nfrom areal.run.database import RunDatabase\n"
        "with RunDatabase(sys.argv[1]):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    database = project.runs / "arithmetic" / "sft" / "run.db"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", hold, str(database)], **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        line = check_line(project(*project.sft()), 1, str(database), "another live run")
        assert f"process {holder.pid}" in line
        holder.stdin.close()


# The disk.


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as folder:
        yield folder


def test_read_only_disk(project, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    says = f"cluster.fileroot: no permission to write in '{small_disk}'"
    refuse(project, project.grpo(f"cluster.fileroot={small_disk}/runs"), says)


def test_recover_folder_that_becomes_read_only(project, small_disk):
    order = project.sft("recover.freq_steps=2", f"cluster.fileroot={small_disk}")
    assert project(*order, "total_train_steps=2").code == 0
    points = small_disk / "arithmetic" / "sft" / "recover"
    subprocess.run(["mount", "--bind", points, points], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", points], check=True)
        ended = project(*order, "total_train_steps=20")
        says = ("Read-only file system", "Training stopped after step", "resumes from", "step_1")
        check_line(ended, 1, *says)
    finally:
        subprocess.run(["umount", points], check=True)
    assert project(*order, "total_train_steps=4").code == 0


def test_too_little_disk_to_start(project, small_disk):
    (small_disk / "ballast").write_bytes(bytes(30 << 20))
    ended = project(*project.sft(f"cluster.fileroot={small_disk}"))
    check_line(ended, 1, "MiB of disk are free", str(small_disk))


@pytest.mark.parametrize("kind", ["sft", pytest.param("grpo", marks=pytest.mark.slow)])
def test_disk_full_on_save(project, small_disk, kind):
    """The run ends with the cause, its last recover point is whole, and it goes on afterwards."""
    order = project.sft if kind == "sft" else project.grpo
    steps = ("recover.freq_steps=1", f"cluster.fileroot={small_disk}")
    assert project(*order(*steps, "total_train_steps=2")).code == 0
    run_dir = small_disk / "arithmetic" / kind
    ballast = small_disk / "ballast"
    fill_disk(ballast, leave=(16 << 20) + (1 << 19))
    ended = project(*order(*steps, "total_train_steps=200", "recover.keep=100"))
    check_line(ended, 1, "No space left on device", str(run_dir), "Training stopped after step")
    points = sorted(p.name for p in (run_dir / "recover").iterdir())
    assert "step_1" in points and all(name.startswith("step_") for name in points)
    assert not list(run_dir.rglob("*.tmp-*"))
    ballast.unlink()
    done = len(points) + 2
    ended = project(*order(*steps, f"total_train_steps={done}", "recover.keep=1"))
    assert ended.code == 0, ended.err[-2000:]
    assert query(run_dir, "SELECT count(*) FROM steps") == [(done,)]


@pytest.mark.parametrize("freq_steps", [pytest.param(1, marks=pytest.mark.slow), 1000])
def test_disk_full_under_the_ledger(project, small_disk, freq_steps):
    """Every write of the database ends the run in one line, and starts it no second time."""
    order = project.grpo(f"cluster.fileroot={small_disk}", "total_train_steps=10000")
    order += ["rollout.max_head_offpolicyness=2", f"recover.freq_steps={freq_steps}"]
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    process = Program(*order, cwd=project.folder, env=env)
    run_dir, ballast = small_disk / "arithmetic" / "grpo", small_disk / "ballast"
    deadline = time.monotonic() + 300
    while steps_done(run_dir) < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    fill(ballast)
    out, err = process.communicate(timeout=900)
    line = check_line(Ended(process.returncode, out, err), 1, str(run_dir))
    assert "No space left on device" in line or "disk is full" in line or "disk I/O error" in line
    assert "resuming from" not in err
    ballast.unlink()
    done = query(run_dir, "SELECT count(*) FROM steps")[0][0] + 2
    ended = project(*order, f"total_train_steps={done}")
    assert ended.code == 0, ended.err[-2000:]
    assert project("ledger", run_dir).code == 0
    assert query(run_dir, "SELECT count(*) FROM steps") == [(done,)]


def fill_disk(file: Path, *, leave: int) -> None:
    file.write_bytes(bytes(shutil.disk_usage(file.parent).free - leave))


# demo and serve.


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--out", "notes.txt"], "--out: "),
        (["--out", "notes.txt/demo"], "--out: "),
        (["--out", "notes.txt", "--fresh"], "--fresh: notes.txt was not made by areal demo"),
        (["--out", "model", "--fresh"], "--fresh: model was not made by areal demo"),
        (["--out", "new", "gconfig.n_sample=3"], "did you mean gconfig.n_samples?"),
        (["--out", "new", "reward_fn=gsm8"], "reward_fn: unknown name 'gsm8'"),
        (["--out", "new", "evaluator.eval_before_train=false"], "evaluator.eval_before_train"),
        (["--out", "new", "--json", "seed=x"], "seed must be a whole number"),
    ],
)
def test_demo(project, argv, says):
    (project.folder / "notes.txt").write_text("notes")
    refuse(project, ["demo", *argv], says)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "nowhere"], "--model nowhere"),
        (["--model", "model", "--dtype", "float8"], "--dtype"),
        (["--model", "model", "--host", "0.0.0.0"], "AREAL_SERVER_TOKEN"),
        (["--model", "model", "--port", "70000", "--token", "t"], "--port must lie between"),
        (["--model", "model", "--threads", "0", "--token", "t"], "--threads must be at least 1"),
        (["--model", "model", "--device", "abacus", "--token", "t"], "--device abacus"),
        (["--model", "cut", "--token", "t"], "model.safetensors is not a whole"),
        (["--model", "bare", "--token", "t"], "bare has neither model.safetensors nor"),
        (["--model", "abacus", "--token", "t"], "model_type 'abacus'"),
    ],
)
def test_serve(project, argv, says):
    for name in ("cut", "bare", "abacus"):
        shutil.copytree(project.model, project.folder / name)
    cut(project.folder / "cut" / "model.safetensors", 1000)
    (project.folder / "bare" / "model.safetensors").unlink()
    edit_config(project.folder / "abacus", model_type="abacus")
    refuse(project, ["serve", *argv], says, AREAL_SERVER_TOKEN="")


def test_serve_on_a_port_in_use(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = ["serve", "--model", "model", "--token", "t", "--port", str(port)]
        refuse(project, argv, f"127.0.0.1:{port}", "choose another port", code=1)


# The same through `python -m`, and with the server in a process of its own.


def test_as_a_program(project):
    ended = python_m("train", RECIPE, "actor.path=./nowhere", cwd=project.folder)
    check_line(ended, 2, "actor.path: folder './nowhere' does not exist")
    assert ended.err.count("\n") == 1


@pytest.mark.slow
def test_broken_reward_with_a_server_process(project):
    overrides = ["reward_fn=broken_parts.raising_reward", "actor.weight_update_mode=shm"]
    argv = project.grpo(f"actor.path={project.model}", *overrides)
    ended = python_m(*argv, cwd=TESTS)  # where the reward is imported from
    check_line(ended, 1, "ZeroDivisionError: the judge is out of order")
