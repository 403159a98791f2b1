"""Alarms fire for their cause and for nothing else; time by cause adds up to the whole."""

from __future__ import annotations

import json

import pytest
from dashboard_world import WrittenRun
from hypothesis import given
from hypothesis import strategies as st

from areal.dashboard.alarms import find_alarms
from areal.dashboard.reader import RunReader, StepRow
from areal.dashboard.seconds import server_time, time_by_cause, trainer_time


def kinds(root) -> set[str]:
    with RunReader(root) as run:
        return {alarm.kind for alarm in find_alarms(run)} - {"disk filling"}  # of this machine


def write(root, **curves) -> None:
    """A run whose statistics are functions of the share of its 40 steps that is done."""
    run = WrittenRun(root, steps=0)
    for step in range(40):
        stats = {key: curve(step / 39) for key, curve in curves.items()}
        run.database.record_step(step, {"timeperf/step": 1.0, **stats})
    run.finish()


@pytest.mark.parametrize(
    ("expected", "key", "curve"),
    [
        ("reward collapse", "rollout/reward", lambda x: min(2 * x, 2 - 2 * x)),
        ("entropy collapse", "actor/entropy/avg", lambda x: 1.0 * 0.01**x),
        ("mismatch drift", "actor/behave_kl/avg", lambda x: 0.5 * x),
        ("KL drift", "actor/kl_ref/avg", lambda x: 3 * x),
        ("truncation rising", "rollout/no_eos", lambda x: 0.9 * x),
        ("staleness at the bound", "rollout/staleness", lambda x: 2.0),
        ("servers replaced", "server/restarts", lambda x: round(9 * x)),
    ],
)
def test_an_alarm_fires_for_its_cause_alone(tmp_path, expected, key, curve):
    write(tmp_path, **{key: curve})
    assert kinds(tmp_path) == {expected}


def test_a_run_that_learns_raises_none(tmp_path):
    curves = {
        "rollout/reward": lambda x: 0.2 + 0.7 * x,
        "actor/entropy/avg": lambda x: 1 - 0.6 * x,
        "actor/importance_weight/avg": lambda x: 1.0 + 0.01 * x,
        "rollout/no_eos": lambda x: 0.02,
        "rollout/staleness": lambda x: 0.8,
        "server/restarts": lambda x: 0,
    }
    write(tmp_path, **curves)
    assert kinds(tmp_path) == set()


def test_tools_that_no_reply_calls(tmp_path):
    write(tmp_path)
    episodes = tmp_path / "logs" / "episodes"
    episodes.mkdir(parents=True)

    def log(reply: dict) -> None:
        turn = {"tools": [{"type": "function"}], "reply": reply}
        lines = [
            json.dumps({"task_id": i, "sample": 0, "time": float(i), "turns": [turn]})
            for i in range(60)
        ]
        (episodes / "host-1.jsonl").write_text("\n".join(lines) + '\n{"half')

    log({"role": "assistant", "content": "no"})
    assert kinds(tmp_path) == {"no tool fired"}
    log({"role": "assistant", "content": "", "tool_calls": [{}]})
    assert kinds(tmp_path) == set()


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["train", "rollout", "save", "update_weights", "unheard_of"]),
            st.floats(0, 100),
        ),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.001, 50),
)
def test_the_trainers_time_adds_up(phases, rest):
    rows = []
    for step, one in enumerate(phases):
        stats = {f"timeperf/{name}": seconds for name, seconds in one.items()}
        stats["timeperf/step"] = sum(one.values()) + rest
        rows.append(StepRow(step, float(step), stats))
    shares = trainer_time(rows)
    assert sum(share.share for share in shares) == pytest.approx(1)
    other = next(share for share in shares if share.cause == "other")
    assert other.seconds == pytest.approx(rest * len(phases), rel=1e-6, abs=1e-6)


def test_where_the_second_went(tmp_path):
    run = WrittenRun(tmp_path, steps=3)
    run.close()
    with RunReader(tmp_path) as reader:
        found = time_by_cause(reader)
    assert found is not None
    shares = {share.cause: share.share for share in found.trainer}
    assert shares == pytest.approx({"training": 0.5, "waiting for episodes": 0.3, "other": 0.2})
    assert "waiting for episodes, 30%" in found.verdict and "servers" in found.verdict
    assert sum(share.share for share in found.rollout) == pytest.approx(1)


def test_the_servers_time():
    rows = [
        StepRow(i, 10.0 * i, {"server/busy_s": 4.0 * i, "server/servers": 2.0}) for i in range(3)
    ]
    shares = {share.cause: share.share for share in server_time(rows)}
    assert shares == pytest.approx({"generating": 0.2, "no request": 0.8})
    assert server_time(rows[:1]) == []
    replaced = StepRow(3, 30.0, {"server/busy_s": 1.0, "server/servers": 2.0})
    assert server_time([*rows, replaced]) == []
