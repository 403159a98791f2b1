"""Whole runs of PPOTrainer: real server process, real rewards, real database."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch
from metrics_page import undocumented
from tiny_run import grpo_config, query

from areal.cli.main import main
from areal.rollout.ledger import Ledger
from areal.rollout.trajectory import decode
from areal.run.database import RunDatabase
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment
from areal.utils.perf_tracer import read_trace

pytestmark = pytest.mark.usefixtures("forked_children")

STEPS, BATCH = 6, 8


@pytest.fixture(scope="module", params=[0, 2], ids=["on-policy", "staleness-2"])
def finished_run(request, tmp_path_factory):
    """(staleness bound, paths) of a run that went to its end."""
    root = tmp_path_factory.mktemp(f"eta{request.param}")
    config = grpo_config(
        root,
        f"rollout.max_head_offpolicyness={request.param}",
        "perf_tracer.enabled=true",
        "rollout.dump_to_file=true",
        "evaluator.freq_steps=3",
        "saver.freq_steps=3",
        "recover.keep=9",
    )
    run_experiment(config)
    return request.param, RunPaths.of(config)


def test_every_prompt_is_trained_once(finished_run):
    _, paths = finished_run
    with RunDatabase(paths.database) as database:
        balance = Ledger(database).balance()
    assert balance["trained"] == balance["total"] == STEPS * BATCH
    assert query(paths.root, "SELECT step, count(*) FROM tasks GROUP BY step") == [
        (step, BATCH) for step in range(STEPS)
    ]


def test_no_token_is_older_than_the_bound(finished_run):
    eta, paths = finished_run
    rows = query(paths.root, "SELECT step, data FROM tasks JOIN trajectories USING (task_id)")
    assert rows
    oldest = 0
    for step, data in rows:
        trajectory = decode(data)
        ages = step - trajectory["versions"][trajectory["loss_mask"].bool()]
        assert ages.min() >= 0 and ages.max() <= eta
        oldest = max(oldest, int(ages.max()))
    assert (oldest > 0) == (eta > 0), "what may be generated ahead is"


def test_the_server_rests_while_the_trainer_trains_on_policy(finished_run):
    eta, paths = finished_run
    events = [event for event in read_trace(paths.trace("controller")) if event["ph"] == "X"]
    train = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "train"]
    generate = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "generate"]
    assert len(train) == STEPS and generate
    overlap = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in train
        for other_start, other_end in generate
    )
    assert eta > 0 or overlap == 0


def test_every_prompt_has_its_life_in_the_trace(finished_run, tmp_path, capsys):
    _, paths = finished_run
    assert main(["trace", str(paths.root), "--out", str(tmp_path / "trace.json")]) == 0
    assert "controller" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begun, ended = defaultdict(list), defaultdict(list)
    for event in events:
        if event.get("cat") == "episode":
            found = begun if event["ph"] == "b" else ended
            found[event["id2"]["global"]].append((event["ts"], event["name"]))
    stages = ["queued", "rollout", "prompt", "tokens", "reward", "waiting", "trained"]
    lanes = {f"prompt {task}" for task in range(STEPS * BATCH)}
    assert lanes <= begun.keys() and any(lane.startswith("eval ") for lane in begun)
    for lane in lanes:
        assert [name for _, name in sorted(begun[lane])] == stages
        assert sorted(name for _, name in ended[lane]) == sorted(stages)
    server = [e for e in events if e["ph"] == "X" and e["name"] == "load weights"]
    assert [e["args"]["version"] for e in server] == list(range(1, STEPS + 1))


def test_an_evaluation_of_its_checkpoints_is_what_it_logged(finished_run, tmp_path):
    """Offline in one process, in the run through a server: the same number, bit for bit."""
    _, paths = finished_run
    out = ["--out", str(tmp_path / "e.db"), "--json", str(tmp_path / "e.json")]
    assert main(["eval", str(paths.root), "--checkpoints", *out]) == 0
    found = json.loads((tmp_path / "e.json").read_text())["evaluations"]
    rows = dict(query(paths.root, "SELECT step, stats FROM steps"))
    logged = {step + 1: json.loads(text).get("eval/reward") for step, text in rows.items()}
    scores = {one["step"]: one["metrics"]["avg@1"]["value"] for one in found}
    assert scores == {3: logged[3], 6: logged[6], None: logged[6]}


def test_each_step_says_what_was_reached_and_what_was_predicted(finished_run):
    _, paths = finished_run
    for (text,) in query(paths.root, "SELECT stats FROM steps WHERE step >= 0"):
        stats = json.loads(text)
        assert stats["tokens_per_second"] > 0 and stats["tokens_per_second_predicted"] > 0
        assert undocumented(stats) == []
    log = (paths.logs / "main.log").read_text(encoding="utf-8")
    assert log.count(" tok/s | predicted ") == STEPS


def test_files_of_a_run(finished_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, paths = finished_run
    AutoModelForCausalLM.from_pretrained(paths.model)
    assert AutoTokenizer.from_pretrained(paths.model)("1+2=")["input_ids"]
    checkpoints = sorted(path.name for path in (paths.checkpoints / "actor").iterdir())
    assert checkpoints == ["epoch0epochstep2globalstep2", "epoch0epochstep5globalstep5"]
    assert paths.config.is_file() and (paths.logs / "main.log").stat().st_size
    assert list((paths.logs / "rollout").rglob("*.jsonl"))
    assert list((paths.logs / "eval-rollout").rglob("*.jsonl"))
    evaluated = query(paths.root, "SELECT step FROM steps WHERE stats LIKE '%eval/reward%'")
    assert evaluated == [(2,), (5,)]


@pytest.mark.parametrize("mode", ["disk", "delta", "xccl"])
def test_other_weight_transports(mode, tmp_path):
    config = grpo_config(
        tmp_path, f"actor.weight_update_mode={mode}", "total_train_steps=3", "recover.mode=off"
    )
    run_experiment(config)
    paths = RunPaths.of(config)
    assert query(paths.root, "SELECT state, count(*) FROM tasks GROUP BY state") == [
        ("trained", 3 * BATCH)
    ]
    assert not list(paths.weights.glob("weight_update_v*"))


def test_an_objective_with_log_probabilities_computed_again(tmp_path):
    """test_examples.py runs the recipes of the other objectives."""
    config = grpo_config(
        tmp_path,
        "actor.recompute_logprob=true",
        "actor.weight_update_mode=direct",
        "total_train_steps=3",
        "recover.mode=off",
    )
    run_experiment(config)
    losses = query(
        RunPaths.of(config).root, "SELECT json_extract(stats, '$.\"actor/loss\"') FROM steps"
    )
    assert len(losses) == 3 and all(torch.isfinite(torch.tensor(value)) for (value,) in losses)


def test_an_earlier_run_is_not_overwritten(finished_run):
    _, paths = finished_run
    config = grpo_config(paths.root.parents[1], "recover.mode=off", "recover.keep=9")
    with pytest.raises(ValueError, match=r"holds an earlier run.*recover\.mode=on.*trial_name"):
        run_experiment(config)


def test_rewards_normalised_by_group_are_trained_on_and_told_as_they_were(tmp_path):
    config = grpo_config(
        tmp_path,
        "gconfig.reward_normalization=true",
        "~actor.reward_norm",
        "actor.weight_update_mode=direct",
        "total_train_steps=3",  # a recover point after 2: the trajectories of the last are kept
        "evaluator.freq_steps=3",
    )
    run_experiment(config)
    root = RunPaths.of(config).root
    rows = query(root, "SELECT data FROM tasks JOIN trajectories USING (task_id) WHERE step = 2")
    groups = [decode(data) for (data,) in rows]
    assert len(groups) == BATCH
    for group in groups:
        assert group["rewards"].mean().item() == pytest.approx(0.0, abs=1e-6)
    raw = torch.cat([group["original_rewards"] for group in groups])
    ((text,),) = query(root, "SELECT stats FROM steps WHERE step = 2")
    stats = json.loads(text)
    assert stats["rollout/reward"] == pytest.approx(raw.mean().item(), abs=1e-5)
    assert stats["rollout/reward"] > 0 and stats["eval/reward"] > 0


def test_valid_dataset_null_switches_the_evaluator_off(tmp_path):
    config = grpo_config(
        tmp_path,
        "valid_dataset=null",
        "actor.weight_update_mode=direct",
        "evaluator={freq_steps: 1, eval_before_train: true}",
        "total_train_steps=2",
    )
    run_experiment(config)
    stats = query(RunPaths.of(config).root, "SELECT step, stats FROM steps")
    assert [step for step, _ in stats] == [0, 1]
    assert not any("eval/" in text for _, text in stats)
