"""Runs are read alive, dead, unfinished, damaged and empty; samples token by token."""

from __future__ import annotations

import json
import math
import sqlite3

import numpy as np
import pytest
import safetensors.numpy
import torch
from dashboard_world import WrittenRun, group

from areal.api.json_text import dumps, loads
from areal.dashboard import text, views
from areal.dashboard.reader import RunReader, UnreadableRunError, find_runs
from areal.dashboard.routes import Routes
from areal.dashboard.samples import SampleFilter, find_samples, read_sample
from areal.rollout.executor import Batch
from areal.rollout.source import Prompt
from areal.run.database import Start


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = WrittenRun(tmp_path_factory.mktemp("runs") / "math" / "first")
    run.finish()
    return run.root


def test_a_living_a_stopped_and_a_finished_run(tmp_path):
    run = WrittenRun(tmp_path / "math" / "first", steps=4)
    with RunReader(run.root) as reader:
        summary = reader.summary()
        assert (summary.name, summary.num_steps, summary.total_steps) == ("math/first", 4, 40)
        assert summary.reward == 0.5
        before = reader.counts()
        run.ledger.issue([Prompt(11, 0, 0, {})], 4)  # a reader keeps its snapshot
        assert reader.counts() == before
        assert before == dict(issued=1, finished=1, trained=8, rejected=0, stale=0, failed=1)
    run.close()
    with RunReader(run.root) as reader:
        assert reader.summary().state == "stopped" and reader.summary().eta_s is None
    again = WrittenRun(tmp_path / "math" / "second", steps=1)
    again.finish()
    with RunReader(again.root) as reader:
        assert reader.summary().state == "finished"
    assert find_runs(tmp_path) == [run.root, again.root]


def test_the_process_that_runs_it_and_the_time_left(tmp_path):
    """A lock is seen by other processes only."""
    import subprocess
    import sys

    run = WrittenRun(tmp_path, steps=4)
    script = (
        "import sys; from areal.dashboard.reader import RunReader\n"
        "with RunReader(sys.argv[1]) as run: one = run.summary()\n"
        "print(one.state, one.eta_s, 'torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, run.root], capture_output=True, text=True, check=True
    )
    run.close()
    assert shown.stdout.split() == ["running", str((40 - 4) * 2.0), "False"]


def test_damaged_empty_and_foreign_files_are_named(tmp_path):
    for name, data in (("damaged", b"SQLite format 3\0" + b"x" * 5000), ("text", b"hello " * 900)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").write_bytes(data)
        with pytest.raises(UnreadableRunError, match="run.db"), RunReader(tmp_path / name):
            pass
        assert views.describe_run(tmp_path / name)["state"] == "unreadable"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.db").touch()
    with RunReader(tmp_path / "empty") as run:
        assert run.summary().state == "empty"
        assert views.now(run)["prompts"]["trained"] == 0 and views.keys(run) == []
        assert find_samples(run, SampleFilter()) == [] and views.prompt(run, 0) is None
    with pytest.raises(FileNotFoundError, match="no run database"), RunReader(tmp_path):
        pass
    (tmp_path / "newer").mkdir()
    with sqlite3.connect(tmp_path / "newer" / "run.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(UnreadableRunError, match="format 99"), RunReader(tmp_path / "newer"):
        pass


@pytest.mark.parametrize(
    ("stats", "found"),
    [
        ("{", "not JSON"),
        ("[1]", "a list, expected"),
        ('{"timeperf/step": "x"}', "'timeperf/step' of step 1 is 'x', expected a number"),
        ('{"tokens": 1' + "0" * 400 + "}", "'tokens' of step 1 is 1000"),
    ],
)
def test_statistics_that_are_none_are_named(tmp_path, stats, found):
    run = WrittenRun(tmp_path, steps=2)
    with run.database.transaction() as connection:
        connection.execute("UPDATE steps SET stats = ? WHERE step = 1", (stats,))
    with RunReader(run.root) as reader, pytest.raises(UnreadableRunError, match=found):
        reader.summary()
    run.close()


def test_a_time_or_a_size_that_is_none_is_named(tmp_path):
    run = WrittenRun(tmp_path, steps=2)
    for change, found in (
        ("UPDATE events SET time = 9e999", "is inf, expected Unix seconds"),
        ("UPDATE starts SET dataset_size = 'many'", "is 'many', expected a number"),
        ("UPDATE steps SET time = 'noon'", "is 'noon', expected Unix seconds"),
    ):
        with run.database.transaction() as connection:
            connection.execute(change)
        described = views.describe_run(run.root)
        assert described["state"] == "unreadable" and found in described["fault"]
    run.close()


def test_numbers_that_json_lacks_hide_no_run(tmp_path):
    broken = dict.fromkeys(("rollout/reward", "timeperf/train", "server/servers"), math.nan)
    run = WrittenRun(tmp_path / "run", **broken, tokens=math.inf)
    with RunReader(run.root) as reader:
        assert "servers -" in text.picture(reader, 80)
    routes = Routes([tmp_path])
    for path in ("runs", "run/0/now", "run/0/curves", "run/0/seconds", "run/0/alarms"):
        dumps(routes.answer(path, {}))
    assert routes.answer("runs", {})[0]["reward"] is None
    run.close()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_odd_statistic_hides_no_run(tmp_path, value):
    """Neither in the list of all runs nor in a view of this one; times add up without it."""
    run = WrittenRun(tmp_path, steps=4)
    names = ("rollout/reward", "timeperf/train", "server/busy_s")
    with run.database.transaction() as connection:
        ((text,),) = connection.execute("SELECT stats FROM steps WHERE step = 3").fetchall()
        odd = json.dumps(json.loads(text) | dict.fromkeys((*names, "timeperf/odd"), value))
        connection.execute("UPDATE steps SET stats = ? WHERE step = 3", (odd,))
    routes = Routes([tmp_path])
    for path in ("runs", "run/0/now", "run/0/seconds", "run/0/curves", "run/0/alarms"):
        loads(dumps(routes.answer(path, {})), path)
    assert routes.answer("runs", {})[0]["reward"] is None
    found = routes.answer("run/0/seconds", {})
    assert sum(one["share"] for one in found["trainer"]) == pytest.approx(1)
    run.close()


def test_of_a_very_long_sample_the_first_tokens_are_shown(tmp_path):
    run, count = WrittenRun(tmp_path), 100_000
    values = {"ids": np.zeros(count, np.int32), "mask": np.ones(count, bool)}
    data = safetensors.numpy.save(values)
    with run.database.transaction() as connection:
        connection.execute("UPDATE samples SET data = ? WHERE task_id = 0", (data,))
    with RunReader(tmp_path) as reader:
        sample = read_sample(reader, task_id=0, sample=0)
    assert sample is not None and f"of {count} tokens" in sample["missing"]
    assert len(sample["ids"]) == len(sample["tokens"]) == len(sample["mask"]) < count
    run.close()


def test_a_run_of_an_areal_without_samples(tmp_path):
    run = WrittenRun(tmp_path)
    with run.database.transaction() as connection:
        connection.execute("DROP TABLE samples")
        connection.execute("DROP TABLE pieces")
    with RunReader(tmp_path) as reader:
        assert views.samples(reader, SampleFilter())["stored"] == 0
        waiting = find_samples(reader, SampleFilter(state="finished"))
        assert [one["output"] for one in waiting] == ["⟨7⟩⟨8⟩", "⟨9⟩⟨3⟩⟨4⟩"]
    run.close()


def test_tokens_of_a_trained_sample(finished):
    with RunReader(finished) as run:
        sample = read_sample(run, task_id=4, sample=1)
        assert sample is not None
        assert sample["ids"] == [5, 6, 9, 3, 4] and len(sample["tokens"]) == 5
        assert sample["mask"] == [False, False, True, False, True]
        assert sample["version"] == [-1, -1, 2, -1, 2]
        assert sample["logprob"] == [0, 0, -2.0, 0, -0.25]
        # Computed values are stored at the position before the token that they are about.
        assert sample["advantage"] == [0, 0, 1, 2, 3]
        assert sample["ratio"][2] == pytest.approx(math.exp(-0.5 + 2.0), abs=1e-5)
        assert (sample["reward"], sample["step"], sample["length"]) == (0.0, 2, 2)
        assert sample["entropy"] == [0, 0, 0.5, 1, 1.5] and sample["missing"] == ""
        first = read_sample(run, task_id=0, sample=1)
        assert first is not None and "entropy" not in first
        assert "actor.use_decoupled_loss" in first["missing"]
        skipped, other = (read_sample(run, task_id=2, sample=row) for row in range(2))
        assert skipped is not None and "entropy" not in skipped and skipped["missing"]
        assert other is not None and other["entropy"] == sample["entropy"]
        assert read_sample(run, task_id=4, sample=2) is None
        assert read_sample(run, task_id=99, sample=0) is None


def test_the_ratio_is_of_the_training_pass_where_no_other_was_made(tmp_path):
    """There `prox_logp` is a copy of what was sampled, whose ratio would be 1 everywhere."""
    run = WrittenRun(tmp_path, steps=1)
    trained = torch.tensor([[math.nan] * 5, [0.0, -1.0, 0.0, -0.5, 0.0]])
    sampled = torch.tensor([[0, -0.5, -1.0, 0, 0], [0, -2.0, 0, -0.25, 0]])
    data = {"rewards": torch.ones(2), "prox_logp": sampled, "train_logp": trained}
    run.recorder.record(Batch(0, [0], [group(0)], []), {**data, "entropy": trained}, 0)
    with RunReader(run.root) as reader:
        skipped, sample = (read_sample(reader, task_id=0, sample=row) for row in range(2))
    run.close()
    assert skipped is not None and skipped["missing"].startswith(
        "ratio and entropy were not computed"
    )
    assert not {"ratio", "entropy", "prox_logp"} & skipped.keys()
    assert sample is not None and sample["train_logp"] == [0, 0, -1.0, 0, -0.5]
    assert sample["ratio"] == pytest.approx([1, 1, math.exp(1), 1, math.exp(-0.25)], abs=1e-4)


def test_samples_are_found_by_every_filter(finished):
    def found(**wanted):
        with RunReader(finished) as run:
            return [(s["task_id"], s["sample"]) for s in find_samples(run, SampleFilter(**wanted))]

    everything = [(4, 0), (4, 1), (2, 0), (2, 1), (0, 0), (0, 1)]  # the first group of each step
    assert found() == everything
    assert found(min_reward=0.5) == [(4, 0), (2, 0), (0, 0)]
    assert found(max_step=0) == [(0, 0), (0, 1)] and found(min_step=2) == [(4, 0), (4, 1)]
    assert found(limit=2, offset=1) == [(4, 1), (2, 0)]
    assert found(text="%%") == found(text="$_") == []  # no wildcards
    with RunReader(finished) as run:
        texts = find_samples(run, SampleFilter(task_id=4))
    assert found(text=texts[1]["output"]) == [(4, 1), (2, 1), (0, 1)]
    assert found(state="finished") == [(6, 0), (6, 1)]
    assert found(state="finished", min_reward=0.5) == [(6, 0)]


def test_samples_of_undone_steps_are_forgotten(tmp_path):
    run = WrittenRun(tmp_path)
    run.database.record_start(Start(1, "", 1000, {}))
    with RunReader(tmp_path) as reader:
        assert {one["step"] for one in find_samples(reader, SampleFilter())} == {0}
    run.close()


def test_the_story_of_prompts(finished):
    with RunReader(finished) as run:
        trained, failed = views.prompt(run, 0), views.prompt(run, 7)
    assert trained is not None and failed is not None
    assert [event["text"].split()[0] for event in trained["story"]] == [
        "issued",
        "generated",
        "trained",
    ]
    assert [one["sample"] for one in trained["samples"]] == [0, 1]
    assert failed["story"][-1]["text"] == "failed: TimeoutError: 3 s, at version 3"


def test_prompts_page_by_page(finished):
    with RunReader(finished) as run:
        first = run.tasks(limit=5)
        rest = run.tasks(limit=5, before=first[-1]["task_id"])
        assert [task["task_id"] for task in first + rest] == list(range(8, -1, -1))
        assert [task["task_id"] for task in run.tasks(step=1)] == [3, 2]


def test_long_curves_are_thinned_and_keep_their_end(tmp_path):
    run = WrittenRun(tmp_path, steps=0)
    with run.database.transaction() as connection:
        connection.executemany(
            "INSERT INTO steps VALUES (?, ?, ?)",
            [(i, float(i), f'{{"loss": {i}, "tokens": 10}}') for i in range(5000)],
        )
    with RunReader(tmp_path) as reader:
        curves = views.curves(reader, ["loss"])
    run.close()
    assert len(curves["values"]["loss"]) <= views.MAX_POINTS + 1
    assert curves["values"]["loss"][-1] == 4999 and curves["axes"]["tokens"][-1] == 50000


def test_the_difference_of_two_configs(tmp_path, finished):
    from dashboard_world import CONFIG

    other = WrittenRun(tmp_path, config=CONFIG.replace("lr: 0.001", "lr: 0.01") + "seed: 3\n")
    with RunReader(finished) as first, RunReader(other.root) as second:
        rows = views.diff(first, second)
    other.close()
    assert [(row["key"], row["first"], row["second"]) for row in rows] == [
        ("actor.optimizer.lr", "0.001", "0.01"),
        ("seed", "(absent)", "3"),
    ]


@pytest.mark.parametrize(
    ("change", "view", "found"),
    [
        ("tasks SET why = x'ff00'", "prompts", r"why of task_id 6 is b'\xff\x00', expected a text"),
        ("tasks SET reward = 'much'", "prompt/2", "is 'much', expected a number"),
        ("tasks SET issued_at = 'noon'", "prompt/2", "is 'noon', expected Unix seconds"),
        ("tasks SET closed_at = 9e18", "prompt/2", "is 9e+18, expected Unix seconds"),
        ("samples SET output = x'ff'", "samples", "expected a text"),
        ("pieces SET text = x'ff'", "sample/2/0", "expected a text"),
        ("events SET text = x'ff'", "now", "expected a text"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path, change, view, found):
    run = WrittenRun(tmp_path, steps=2)
    with run.database.transaction() as connection:
        connection.execute(f"UPDATE {change}")
    with pytest.raises(UnreadableRunError) as raised:
        Routes([run.root]).answer(f"run/0/{view}", {})
    assert found in str(raised.value) and "run.db" in str(raised.value)
    run.close()


def test_tensors_of_other_shapes_are_named(tmp_path):
    run = WrittenRun(tmp_path, steps=2)
    ids = np.zeros(4, np.int32)
    for tensors in (
        {},
        {"ids": ids, "mask": ids[:3]},
        {"ids": ids.reshape(2, 2)},
        {"ids": np.full(4, np.nan, np.float32)},
    ):
        with run.database.transaction() as connection:
            data = safetensors.numpy.save(tensors)
            connection.execute("UPDATE samples SET data = ?", (data,))
            connection.execute("UPDATE trajectories SET data = ?", (data,))
        for view, query in (("sample/2/0", {}), ("samples", {"state": "finished"})):
            with pytest.raises(UnreadableRunError, match="trajectory of prompt"):
                Routes([run.root]).answer(f"run/0/{view}", query)
    run.close()
