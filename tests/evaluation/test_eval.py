"""`areal eval` and `areal reverify` end to end: real models, runs, servers, a real kill."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from aiohttp import web
from cli_process import Program
from forked_children import fork_children
from tiny_run import grpo_config, query, wait_until

from areal.cli.demo import make_model
from areal.cli.main import main
from areal.dashboard.reader import RunReader
from areal.evaluation.runner import VersionChangedError, make_plan, run_missing
from areal.evaluation.settings import Options, load_settings
from areal.evaluation.store import ResultStore
from areal.evaluation.targets import find_targets
from areal.models.hf_io import load_hf
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment

REWARD = "sample_rewards.digit_share_reward_fn"
DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "model"
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Paths of a run with an evaluation and a checkpoint after each of its two steps."""
    config = grpo_config(
        tmp_path_factory.mktemp("run"),
        "total_train_steps=2",
        "actor.weight_update_mode=direct",
        "rollout.max_head_offpolicyness=0",
        "evaluator.freq_steps=1",
        "saver.freq_steps=1",
        "recover.freq_steps=1",
        "recover.keep=9",
        "eval_gconfig={n_samples: 3, max_new_tokens: 6}",
    )
    run_experiment(config)
    return RunPaths.of(config)


def evaluate(out: Path, *argv: object) -> dict:
    """The JSON of a call; the database is beside it."""
    assert (
        main(["eval", *map(str, argv), "--out", str(out / "e.db"), "--json", str(out / "e")]) == 0
    )
    return json.loads((out / "e").read_text())


def samples(out: Path) -> list[tuple]:
    sql = "SELECT row, sample, state, reward, completion, num_tokens, version FROM samples"
    with closing(sqlite3.connect(out / "e.db")) as connection:
        return sorted(connection.execute(sql))


def values(evaluation: dict) -> dict[str, float]:
    return {name: metric["value"] for name, metric in evaluation["metrics"].items()}


def test_a_run_has_the_score_that_its_own_evaluator_logged(run, tmp_path):
    """To the last bit, for sampled answers and a reward with many values."""
    logged = [
        json.loads(stats)["eval/reward"]
        for step, stats in query(run.root, "SELECT step, stats FROM steps ORDER BY step")
        if step >= 0
    ]
    found = evaluate(tmp_path, run.root, "--checkpoints")["evaluations"]
    assert [one["step"] for one in found] == [1, 2, None]
    scores = [one["metrics"]["avg@3"]["value"] for one in found]
    assert scores == [*logged, logged[-1]]
    assert len(set(logged)) == 2 and 0 < logged[0] < 1
    assert all(one["version"] == 0 and one["samples"] == 48 for one in found)


def test_the_counters_of_a_step_include_its_evaluation(run):
    """Else time by cause (areal dash) would not know what the servers did meanwhile."""
    with RunReader(run.root) as reader:
        (row,), config = reader.steps(last=1), reader.config()
        trained = reader.counts()["trained"] * config["gconfig.n_samples"]
    assert row.stats["server/finished"] >= trained + 2 * 48


def test_failed_samples_count_alike_in_training(tmp_path):
    """A sample that fails is in both denominators, and costs the others of its row nothing."""
    config = grpo_config(
        tmp_path,
        "total_train_steps=1",
        "actor.weight_update_mode=direct",
        "rollout.max_head_offpolicyness=0",
        "rollout.max_failure_ratio=1",
        "reward_fn=sample_rewards.fails_on_some_answers",
        "evaluator.freq_steps=1",
        "eval_gconfig={n_samples: 3, max_new_tokens: 6}",
    )
    run_experiment(config)
    run = RunPaths.of(config).root
    ((logged,),) = query(run, "SELECT stats FROM steps WHERE step = 0")
    stats = json.loads(logged)
    (one,) = evaluate(tmp_path, run)["evaluations"]
    assert 0 < one["counts"]["failed"] == stats["eval/unscored"] < one["samples"]
    assert one["metrics"]["avg@3"]["value"] == stats["eval/reward"] > 0


def test_a_curve_over_checkpoints(run, tmp_path, capsys):
    evaluate(tmp_path, run.root, "--checkpoints", "--limit", 2)
    out = capsys.readouterr().out
    assert "avg@3 of the checkpoints, steps 1 to 2" in out
    assert re.search(r"^ +step 1 +step 2$", out, re.MULTILINE)
    assert f"{run.root}@1" in out and "2 x 3" in out


def test_results_do_not_depend_on_order_concurrency_or_interruption(model, tmp_path):
    """One answer at a time, all at once, or a part first: the same samples."""
    argv = ["--suite", "arithmetic", "--reward", REWARD, "--limit", 6]
    made = []
    for name, counts, override in (
        ("together", [4], "rollout.max_concurrent_rollouts=64"),
        ("alone", [4], "rollout.max_concurrent_rollouts=1"),
        ("more later", [1, 3, 4], "rollout.max_concurrent_rollouts=5"),
    ):
        (out := tmp_path / name).mkdir()
        for n in counts:
            sampled = "eval_gconfig.greedy=false"
            numbers = evaluate(out, model, override, sampled, *argv, "--n", n)["evaluations"][0]
        made.append((values(numbers), samples(out)))
    assert made[0] == made[1] == made[2]
    assert len(made[0][1]) == 24 and len({row[4] for row in made[0][1]}) > 10


def test_a_killed_evaluation_does_only_what_is_missing(model, tmp_path):
    argv = ["eval", model, "workflow_kwargs={reward_kwargs: {max_workers: 1}}", "--limit", "24"]
    argv += ["--suite", "arithmetic", "--reward", "sample_rewards.slow_digit_share"]
    argv += ["--out", "e.db"]
    database = tmp_path / "e.db"

    def rows() -> list[tuple]:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT * FROM samples ORDER BY row").fetchall()

    killed = Program(*argv, cwd=tmp_path)
    wait_until(killed, lambda: database.exists() and _has_table(database) and len(rows()) > 2)
    killed.kill()
    killed.wait()
    before = rows()
    assert 2 < len(before) < 24
    again = Program(*argv, cwd=tmp_path).wait(900)
    assert again.code == 0, again.err
    assert f"{len(before)} of 24 samples are there" in again.err
    after = rows()
    assert len(after) == 24 and set(before) <= set(after), "what was there is as it was, times too"
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    evaluate(undisturbed, model, "--suite", "arithmetic", "--reward", REWARD, "--limit", 24)
    assert [row[:5] for row in samples(undisturbed)] == [(*row[1:5], row[6]) for row in after]


def _has_table(database: Path) -> bool:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return bool(connection.execute("SELECT 1 FROM sqlite_master").fetchall())


def test_failures_are_named_and_stay_in_the_denominator(model, tmp_path, capsys):
    rows = [{"question": f"{i}+1=", "answer": "broken" if i == 3 else ""} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [model, "eval_gconfig.max_new_tokens=4"]
    suite = ["--suite", tmp_path / "rows.jsonl", "--reward", "sample_rewards.fails_on_some"]
    found = evaluate(tmp_path, *argv, "rollout.max_failure_ratio=0.2", *suite)
    (one,) = found["evaluations"]
    assert one["counts"]["failed"] == 1 and sum(one["counts"].values()) == one["samples"] == 8
    assert values(one) == {"avg@1": 7 / 8, "pass@1": 7 / 8}
    assert ["no verdict on this row" in cause for cause in one["causes"]] == [True]
    assert "1 samples failed and count as 0" in capsys.readouterr().out
    assert one["counts"]["truncated"] > 0, "a random model rarely ends within four tokens"
    # More failures than allowed are no score at all.
    assert main(["eval", *map(str, [*argv, *suite, "--out", tmp_path / "f.db"])]) == 1
    assert "rollout.max_failure_ratio=0.1 allows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suite", "path"),
    [
        ("arithmetic", None),
        ("countdown", None),
        ("gsm8k", DATA / "gsm8k_sample"),
        ("math", DATA / "math500_sample"),
        ("code", DATA / "humaneval_sample"),
    ],
)
def test_the_oracle_solves_every_suite(suite, path, tmp_path):
    loader = {"gsm8k": "gsm8k", "math": "math500", "code": "humaneval"}.get(suite)
    overrides = []
    if path is not None:
        kwargs = f"valid_dataset.dataset_kwargs={{loader: {loader}}}"
        overrides = [f"valid_dataset.path={path}", kwargs]
    found = evaluate(tmp_path, "--agent", "oracle", "--suite", suite, "--limit", 4, *overrides)
    (one,) = found["evaluations"]
    assert values(one)["avg@1"] == 1.0, one["causes"]


def test_a_pair_is_compared_by_problem(model, run, tmp_path, capsys):
    argv = ["--suite", "arithmetic", "--reward", REWARD, "--limit", 10, "--n", 2]
    found = evaluate(tmp_path, "--compare", model, run.root, *argv)
    a, b = found["evaluations"]
    pair = found["comparison"]
    change = values(b)["avg@2"] - values(a)["avg@2"]
    assert pair["difference"]["value"] == pytest.approx(change)
    assert pair["better"] + pair["worse"] <= 10
    assert "paired over 10 problems" in capsys.readouterr().out
    same = evaluate(tmp_path, "--compare", run.root, run.model, *argv)["comparison"]
    assert (same["difference"]["value"], same["p_value"]) == (0.0, 1.0)


@pytest.fixture(scope="module")
def server(model):
    from areal.engine.remote.native import launch_native_server

    with fork_children():
        child, address = launch_native_server(
            model, token="secret", num_pages=800, setup_timeout_s=60
        )
    yield address
    child.terminate()


def test_a_native_server_gives_the_same_samples_as_its_folder(
    model, server, tmp_path, monkeypatch, caplog
):
    """Also through an agent, which talks HTTP."""
    monkeypatch.setenv("AREAL_SERVER_TOKEN", "secret")
    here, there = tmp_path / "here", tmp_path / "there"
    for agent in ([], ["--agent", "sample_agents.DigitShare"]):
        argv = ["--suite", "arithmetic", "--reward", REWARD, "--limit", 3, "--n", 2, *agent]
        for out, target in ((here, model), (there, f"http://{server}")):
            out.mkdir(exist_ok=True)
            evaluate(out, target, *argv)
    assert samples(here) == samples(there) and len(samples(here)) == 12
    gc.collect()
    assert "Unclosed client session" not in caplog.text


def test_weights_that_change_end_an_evaluation(model, server, tmp_path, monkeypatch):
    """Every counted token is of one version."""
    from areal.engine.remote.server_control import ControlClient
    from areal.models.hf_io import build_model, read_hf_config
    from areal.weight_sync.publication import publish

    monkeypatch.setenv("AREAL_SERVER_TOKEN", "secret")
    (target,) = find_targets([f"http://{server}"], checkpoints=False)
    plan = make_plan(target, load_settings(target, Options(suite="arithmetic")), limit=2)
    module = build_model(read_hf_config(model), device="cpu", dtype=torch.float32)
    load_hf(module, model)
    publish(module.named_hf_tensors(), tmp_path / "weights", 1)
    control = ControlClient(server, "secret", timeout_s=30)
    control.post("/update_weights", path=str(tmp_path / "weights"), version=1)
    with ResultStore(tmp_path / "e.db") as store:
        with pytest.raises(VersionChangedError, match="version 0 when it began"):
            run_missing(plan, store)
        assert store.results(plan.evaluation.id) == []


@pytest.fixture
def chat_server():
    """An OpenAI-compatible server of somebody else; yields its address and what it was asked."""
    asked: list[dict] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        text = body["messages"][-1]["content"]
        answer = str(eval(text.rstrip("="))) if "9" not in text else "I cannot"  # noqa: S307
        choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        if "9" in text:
            choice["finish_reason"] = "length"
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 5}})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "theirs"}]})

    loop, started = asyncio.new_event_loop(), threading.Event()
    address: list[str] = []

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", complete), web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait(300)
    yield address[0], asked
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_any_openai_compatible_server(chat_server, tmp_path):
    address, asked = chat_server
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in (11, 12, 19)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--suite", tmp_path / "rows.jsonl", "--reward", "gsm8k", "--n", 2]
    (one,) = evaluate(tmp_path, address, *argv)["evaluations"]
    assert values(one)["avg@2"] == pytest.approx(2 / 3)
    assert one["counts"] == {"scored": 4, "truncated": 2, "rejected": 0, "failed": 0}
    assert one["tokens"] == 30 and one["version"] is None
    assert {body["model"] for body in asked} == {"theirs"}
    assert len({body["seed"] for body in asked}) == 6, "every sample has its own"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "TARGET is missing"),
        (["MODEL"], "--suite says what a model is evaluated on"),
        (["MODEL", "--suite", "gsm9k"], "unknown suite 'gsm9k'; expected one of arithmetic"),
        (["MODEL", "--suite", "none.jsonl"], "none.jsonl does not exist"),
        (["nowhere", "--suite", "arithmetic"], "nowhere: expected a run's folder"),
        (["MODEL", "--suite", "arithmetic", "--n", "0"], "--n must be at least 1, got 0"),
        (["MODEL", "--suite", "arithmetic", "--k", "2"], "--k: expected numbers from 1 to the"),
        (["MODEL", "gconfg.n=1", "--suite", "arithmetic"], "gconfg: unknown key"),
        (["MODEL", "--suite", "arithmetic", "gconfg.n=1"], "gconfg: unknown key"),
        (["MODEL", "--suite", "arithmetic", "other"], "unknown argument 'other'"),
        (["MODEL", "eval_gconfig.n_samples=2", "--suite", "arithmetic"], "add eval_gconfig.greedy"),
        (["MODEL", "--suite", "arithmetic", "--reward", "nope"], "reward_fn: unknown name 'nope'"),
        (["MODEL", "--agent", "oracle", "--suite", "arithmetic"], "--agent oracle needs no model"),
        (["http://127.0.0.1:9", "--suite", "arithmetic"], "no server answers there"),
        (["MODEL", "--suite", "arithmetic", "--out", "no/such/e.db"], "--out: folder no/such"),
    ],
)
def test_mistakes_are_one_line(argv, message, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [str(model) if word == "MODEL" else word for word in argv]
    try:
        code = main(["eval", *argv])
    except SystemExit as end:  # the parser's
        code = end.code
    assert code in (1, 2)
    err = capsys.readouterr().err
    assert message in err and err.count("\n") <= 2, err


def test_a_file_that_is_no_database_of_ours_is_left_alone(model, tmp_path, capsys):
    (tmp_path / "e.db").write_text("precious")
    argv = ["eval", str(model), "--suite", "arithmetic", "--out", str(tmp_path / "e.db")]
    assert main(argv) == 2
    assert "is not a database of areal eval" in capsys.readouterr().err
    assert (tmp_path / "e.db").read_text() == "precious"


# areal reverify.


def reverified(run: RunPaths, reward: str, tmp_path) -> list[dict]:
    out = tmp_path / "samples.jsonl"
    assert main(["reverify", str(run.root), "--reward", reward, "--json", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def modified(run: RunPaths) -> dict[Path, int]:
    """But for the lock of SQLite, which readers touch too."""
    files = (file for file in run.root.rglob("*") if not file.name.endswith("-shm"))
    return {file: file.stat().st_mtime_ns for file in files}


def test_reverify_by_the_same_reward_gives_the_same_scores(run, tmp_path, capsys):
    before = modified(run)
    samples = reverified(run, "sample_rewards.digit_share_reward_fn", tmp_path)
    assert before == modified(run), "only read"
    ((kept,),) = query(run.root, "SELECT count(*) FROM trajectories")
    assert len(samples) == 4 * kept > 0
    assert all(s["new"] == s["old"] for s in samples), "to the last bit, as stored"
    assert any(s["old"] > 0 for s in samples)
    out = capsys.readouterr().out
    assert f"{len(samples)} samples of {kept} prompts" in out and "; 0 samples changed" in out


def test_reverify_by_another_reward_tells_what_changes(run, tmp_path, capsys):
    samples = reverified(run, "sample_rewards.length_of_answer", tmp_path)
    assert all(s["new"] == len(s["completion"]) for s in samples)
    out = capsys.readouterr().out
    changed = sum(s["new"] != s["old"] for s in samples)
    assert f"{changed} samples changed" in out and " -> " in out


def test_reverify_names_a_reward_that_fails(run, tmp_path, capsys):
    samples = reverified(run, "sample_rewards.never_judges", tmp_path)
    assert all(s["new"] is None for s in samples)
    assert f"{len(samples)} samples could not be judged" in capsys.readouterr().out


def test_mistakes_of_reverify(run, tmp_path, capsys):
    for folder, reward, message in (
        (tmp_path, "gsm8k", "is not the folder of a run"),
        (run.root, "gsm9k", "--reward: unknown name 'gsm9k'"),
    ):
        assert main(["reverify", str(folder), "--reward", reward]) == 2
        assert message in capsys.readouterr().err
