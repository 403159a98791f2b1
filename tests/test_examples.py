"""Every file under examples/ is valid, short, and runs: a few steps on a CPU with a tiny model.

A recipe for a GPU runs too, with the tiny model and the sample of its data set under tests/data.
Training and generating share one process (`weight_update_mode=direct`), which saves the seconds a
server takes to start; test_grpo_run.py has the server.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import Program, python_file
from metrics_page import undocumented
from sandbox_support import needs_sandbox
from tiny import write_tiny_model
from tiny_run import query

from areal.cli.main import main
from areal.cli.train import load_config
from areal.environments.hubs.catalog import check_env
from areal.run.paths import RunPaths

pytestmark = pytest.mark.examples

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
EXAMPLES = ROOT / "examples"
CLUSTER_FILES = sorted(EXAMPLES.glob("cluster/*.yaml"))  # not ours to read: test_cluster_files.py
RECIPES = sorted(set(EXAMPLES.rglob("*.yaml")) - set(CLUSTER_FILES))
SCRIPTS = {  # script -> the recipe it is run with
    "agents/train_agent.py": "agents/arithmetic_grpo.yaml",
    "alignment/train_dpo.py": "alignment/arithmetic_dpo.yaml",
    "countdown/train_countdown.py": "countdown/countdown_grpo.yaml",
    "math/gsm8k_rl.py": "math/gsm8k_grpo.yaml",
    "math/train_grpo.py": "math/arithmetic_grpo.yaml",
    "multi_turn_math/train_multi_turn.py": "multi_turn_math/arithmetic_grpo.yaml",
    "sft/train_sft.py": "sft/arithmetic_sft.yaml",
}
LOOP = "math/rl_loop.py"  # reads no recipe
PARTS = {  # what a recipe is made with or names, by itself no training
    "agents/cli_agent.py",  # and the next four: run by make test-agents, which has their packages
    "agents/online_client.py",
    "agents/with_anthropic.py",
    "agents/with_langgraph.py",
    "agents/with_openai_agents.py",
    "cluster/autoscale.py",
    "code/functions.py",
    "code/mbpp.py",
    "customer_service/lessons.py",
    "customer_service/prepare.py",
    "customer_service/service.py",
    "customer_service/shop.py",
    "customer_service/users.py",
    "games/guess.py",
    "hubs/long_model.py",
    "hubs/openenv_server.py",
    "hubs/reverse.py",
    "lessons/dialogues.py",
    "search/bm25.py",
    "search/facts.py",
    "search/search.py",
    "smollm2/chain_sum.py",
    "smollm2/prepare.py",
    "terminal/lessons.py",
    "terminal/terminal.py",
    "tir/warm_start.py",
    "vlm/make_model.py",
    "vlm/shapes.py",
    "vlm/shapes_agent.py",
}
SAMPLES = {  # data set of a hub, or made by a script -> what stands for it here
    "Anthropic/hh-rlhf": ("hh_rlhf_sample", "hh-rlhf"),
    "BUAADreamer/clevr_count_70k": ("clevr_count_sample", "clevr_count_70k"),
    "Jiayi-Pan/Countdown-Tasks-3to4": ("countdown_sample", "countdown"),
    "data/torl_data": ("torl_sample", "torl_data"),
    "google-research-datasets/mbpp": ("mbpp_sample", "examples.code.mbpp.load"),
    "hiyouga/geometry3k": ("geometry3k_sample", "geometry3k"),
    "openai/gsm8k": ("gsm8k_sample", "gsm8k"),
    "runs/smollm2/data": ("chain_sum_sample", "examples.smollm2.chain_sum.load"),
}
ONLINE = sorted(EXAMPLES.glob("agents/online_*.yaml"))  # wait for their client
NEED_SANDBOX = ("terminal", "tir")
RUN_ALONE = [
    pytest.param(one, marks=[needs_sandbox] if one.parent.name in NEED_SANDBOX else [])
    for one in RECIPES
    if one not in ONLINE
]
ADMIN_KEY = "a-secret-for-the-tests"
STEPS = 2


def name_of(recipe: Path) -> str:
    return recipe.relative_to(EXAMPLES).with_suffix("").as_posix()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model with random weights and one token per character, with room for GSM8K's prompts."""
    from areal.dataset.arithmetic import build_char_tokenizer

    folder = tmp_path_factory.mktemp("model")
    vocab_size = len(build_char_tokenizer(folder))
    return write_tiny_model(folder, vocab_size=vocab_size, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory):
    """The model of examples/vlm, which stands for vision models of a hub too."""
    from examples.vlm.make_model import write_model

    folder = tmp_path_factory.mktemp("vlm") / "model"
    write_model(folder)
    return folder


@pytest.fixture
def model_folder(recipe, request):
    sees = recipe.parent.name == "vlm"
    return request.getfixturevalue("seeing_folder" if sees else "tiny_folder")


@pytest.fixture(autouse=True)
def checkout_on_the_path(monkeypatch):
    """As for a user who starts in the checkout: recipes name code beside them."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_the_recipe_is_valid_and_short(recipe, model_folder, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AREAL_ADMIN_API_KEY", ADMIN_KEY)
    config = load_config([str(recipe)])
    skip_without_hub(config)
    overrides = [*model_overrides(config, model_folder), *backend_overrides(config)]
    assert main(["check", str(recipe), *overrides]) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    lines = recipe.read_text().splitlines()
    assert lines[0].startswith("# "), "a recipe opens with what it shows"
    assert f"areal train {recipe.relative_to(ROOT).as_posix()}" in recipe.read_text()
    assert sum(not line.strip().startswith("#") for line in lines) < 60


@pytest.mark.parametrize("recipe", RUN_ALONE, ids=name_of)
def test_the_recipe_runs(recipe, model_folder, tmp_path, monkeypatch):
    from areal.trainer.experiment import run_experiment

    skip_without_hub(load_config([str(recipe)]))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES / "hubs"))  # where verifiers looks for modules
    small = small_overrides(load_config([str(recipe)]), model_folder, tmp_path)
    config = load_config([str(recipe), *small])
    run_experiment(config)
    assert_trained(config)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=[pytest.mark.slow] if one != ONLINE[0] else []) for one in ONLINE],
    ids=name_of,
)
def test_the_run_trains_on_episodes_from_outside(recipe, tiny_folder, tmp_path):
    small = small_overrides(load_config([str(recipe)]), tiny_folder, tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    small += [f"rollout.agent.port={port}"]
    env = {
        **os.environ,
        "AREAL_ADMIN_API_KEY": ADMIN_KEY,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    # Shares of digits differ from the first step; random weights never find a right answer.
    client = [sys.executable, "-c", DIGIT_CLIENT, f"http://127.0.0.1:{port}"]
    with subprocess.Popen(client, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as outside:
        try:
            done = Program("train", recipe, *small, env=env).wait()
            assert done.code == 0, done.err
            printed, _ = outside.communicate(timeout=900)
        finally:
            outside.kill()
    config = load_config([str(recipe), *small])
    assert_trained(config)
    assert int(printed.split()[0]) >= STEPS * 4 * config.gconfig.n_samples


DIGIT_CLIENT = """
import sys
from examples.agents import online_client
def digits(prompt, completion, *ids, **row):
    return sum(letter.isdigit() for letter in completion) / max(len(completion), 1)
def play(session):
    return online_client.play(session, digits)
print(online_client.main(sys.argv[1], play), "episodes")
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_runs(script, tiny_folder, tmp_path, monkeypatch):
    file, recipe = EXAMPLES / script, str(EXAMPLES / SCRIPTS[script])
    # Importable by name, so that the reward processes find the script's functions.
    monkeypatch.syspath_prepend(file.parent)
    small = small_overrides(load_config([recipe]), tiny_folder, tmp_path)
    importlib.import_module(file.stem).main([recipe, *small])
    assert_trained(load_config([recipe, *small]))


def test_the_loop_in_one_file_trains(tiny_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend((EXAMPLES / LOOP).parent)
    options = {
        "--model": tiny_folder,
        "--steps": STEPS,
        "--prompts": 4,
        "--samples": 4,
        # Random weights never find a right answer; shares of digits differ from the first step.
        "--reward": "sample_rewards.digit_share_reward_fn",
    }
    importlib.import_module("rl_loop").main([str(x) for pair in options.items() for x in pair])
    lines = capsys.readouterr().out.splitlines()
    steps = [dict(part.rsplit(" ", 1) for part in line.split(" | ")) for line in lines]
    assert [step["step"] for step in steps] == ["1/2", "2/2"]
    assert all(float(step["gradient"]) > 0 for step in steps)
    assert all(0 <= float(step["staleness"]) <= 2 for step in steps)


def test_the_loop_names_a_model_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend((EXAMPLES / LOOP).parent)
    with pytest.raises(SystemExit):
        importlib.import_module("rl_loop").main(["--model", str(tmp_path / "none")])
    assert "none is no folder; run `areal demo` once" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_runs_as_users_start_it(tiny_folder, tmp_path):
    recipe = str(EXAMPLES / "sft" / "arithmetic_sft.yaml")
    small = small_overrides(load_config([recipe]), tiny_folder, tmp_path)
    script = EXAMPLES / "sft" / "train_sft.py"
    done = subprocess.run(
        [sys.executable, str(script), recipe, *small], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert_trained(load_config([recipe, *small]))


def test_the_documented_command_trains(tiny_folder, tmp_path):
    recipe = EXAMPLES / "math" / "gsm8k_grpo.yaml"
    small = small_overrides(load_config([str(recipe)]), tiny_folder, tmp_path)
    command = ["examples/math/gsm8k_rl.py", "--config", "examples/math/gsm8k_grpo.yaml"]
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = python_file(*command, "scheduler.type=local", *small, cwd=ROOT, env={"PYTHONPATH": path})
    assert done.code == 0, done.err
    assert_trained(load_config([str(recipe), *small]))


def test_every_script_and_recipe_is_listed():
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert found == {*SCRIPTS, *PARTS, LOOP}
    readme = (EXAMPLES / "README.md").read_text()
    for name in [
        *found,
        *(path.relative_to(EXAMPLES).as_posix() for path in [*RECIPES, *CLUSTER_FILES]),
    ]:
        folder, _, file = name.rpartition("/")
        assert f"({folder}/{file})" in readme, f"examples/README.md does not link {name}"


@pytest.mark.parametrize(
    "completion, reward",
    [("The answer is -13.", 1.0), ("0 - 9 - 4 = -13", 1.0), ("-13 or 13", 0.0), ("none", 0.0)],
)
def test_a_sum_is_scored_by_its_last_number(completion, reward):
    from examples.smollm2.chain_sum import last_number_reward_fn

    assert last_number_reward_fn("", completion, [], [], answer="-13") == reward


def test_missing_sums_name_the_script_that_makes_them(tmp_path):
    from examples.smollm2.chain_sum import load

    with pytest.raises(FileNotFoundError, match="train.jsonl .*prepare.py"):
        load(str(tmp_path), split="train", tokenizer=None)


@pytest.mark.parametrize(
    "algorithm, loss",
    [("grpo", "ppo"), ("gspo", "gspo"), ("sapo", "sapo"), ("cispo", "cispo"), ("dapo", "ppo")],
)
def test_a_recipe_selects_the_loss_it_is_named_after(algorithm, loss):
    config = load_config([str(EXAMPLES / "math" / f"arithmetic_{algorithm}.yaml")])
    assert config.actor.policy_loss == loss


def skip_without_hub(config) -> None:
    """A hub's Python is made by `areal env create`, and an OpenEnv server by its user."""
    env = getattr(config, "env", None) or ""
    try:
        check_env(env)
    except ValueError as error:
        pytest.skip(str(error))
    if env.startswith("openenv:"):
        port = int(env.rpartition(":")[2])
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                pytest.skip(f"no server answers at {env}")


def model_overrides(config, tiny_folder: Path) -> list[str]:
    """The tiny model in place of what `areal demo` makes, and of models on a hub."""
    return [f"{role}.path={tiny_folder}" for role in config.models()]


def backend_overrides(config) -> list[str]:
    """Megatron needs a CUDA device, and a layout of several ranks as many processes."""
    backend = config.actor.backend
    if backend is None or backend in ("archon:d1", "fsdp:d1"):
        return []
    return ["actor.backend=fsdp:d1" if backend.startswith("fsdp") else "actor.backend=archon:d1"]


def small_overrides(config, tiny_folder: Path, root: Path) -> list[str]:
    """The recipe as it is, but for sizes, models, data of a hub, and what takes time to write."""
    changes = {
        "cluster.fileroot": root,
        "actor.path": tiny_folder,
        "total_train_epochs": 10,
        "total_train_steps": STEPS,
        "evaluator": f"{{freq_steps: {STEPS}}}" if config.valid_dataset else "{}",
        "saver": "{}",
        "recover": "{mode: off}",
        **dataset_changes("train_dataset", config.train_dataset),
        **dataset_changes("valid_dataset", config.valid_dataset),
    }
    if config.trainer == "ppo":
        changes |= ppo_changes(config)
        if config.teacher is not None:
            changes["teacher.path"] = tiny_folder
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return [*overrides, *backend_overrides(config)]


def dataset_changes(section: str, dataset) -> dict[str, object]:
    if dataset is None:
        return {}
    changes = {f"{section}.batch_size": 4}
    if dataset.path in SAMPLES:
        folder, loader = SAMPLES[dataset.path]
        kwargs = {**dataset.dataset_kwargs, "loader": loader}
        changes[f"{section}.path"] = DATA / folder
        changes[f"{section}.max_length"] = "null"
        if not (DATA / folder / f"{dataset.split}.jsonl").is_file():
            changes[f"{section}.split"] = "train"
    else:
        kwargs = {**dataset.dataset_kwargs, "num_rows": 16}
    changes[f"{section}.dataset_kwargs"] = str(kwargs)
    return changes


def ppo_changes(config) -> dict[str, object]:
    changes = {
        "actor.weight_update_mode": "direct",
        "native.num_pages": 1024,  # to clear those of 64 whole contexts takes a third of the run
        "gconfig.n_samples": min(config.gconfig.n_samples, 4),
        "gconfig.max_new_tokens": 8,
        # Random weights never find a right answer; shares of digits differ from the first step.
        "reward_fn": "sample_rewards.digit_share_reward_fn",
    }
    if config.workflow == "env":
        changes["workflow_kwargs.max_turns"] = 2
    if "user_url" in config.env_kwargs:
        changes["env_kwargs.user_url"] = ""  # no second model here: the scripted user
    if config.actor.overlong_reward_penalty:
        changes["actor.overlong_tokens"] = 2
    return changes


def assert_trained(config) -> None:
    """All steps are in the database with a finite loss and documented names, the model on disk."""
    paths = RunPaths.of(config)
    loss = "actor/loss" if config.trainer == "ppo" else "loss"
    steps = [json.loads(text) for (text,) in query(paths.root, "SELECT stats FROM steps")]
    assert len(steps) == STEPS
    assert all(math.isfinite(stats[loss]) for stats in steps), steps
    assert undocumented(name for stats in steps for name in stats) == []
    is_adapter = config.models()["actor"].use_lora
    saved = "adapter_config.json" if is_adapter else "config.json"
    assert (paths.model / saved).is_file()
    images = "preprocessor_config.json"  # without it the model could not be shown an image
    if (Path(config.models()["actor"].path) / images).is_file():
        assert (paths.model / images).is_file()
