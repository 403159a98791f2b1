"""Alarms fire for their cause and for nothing else; time by cause adds up to the whole."""

from __future__ import annotations

import json
import re

import pytest
from dashboard_world import CONFIG, WrittenRun
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import NativeServerConfig, SGLangConfig, vLLMConfig
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


def test_staleness_at_the_bound_is_a_note_until_work_is_lost(tmp_path):
    for lost, level in ((0, "note"), (5, "warning")):
        curves = {"rollout/staleness": lambda x: 2.0, "rollout/stale": lambda x, n=lost: n * x}
        write(tmp_path / level, **curves)
        with RunReader(tmp_path / level) as run:
            found = [alarm for alarm in find_alarms(run) if alarm.kind == "staleness at the bound"]
        assert [alarm.level for alarm in found] == [level]


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
    assert "waiting for episodes, 30%" in found.verdicts[0] and "servers" in found.verdicts[0]
    assert len(found.verdicts) == 3
    assert sum(share.share for share in found.rollout) == pytest.approx(1)


def server_row(step: int, **counters: float) -> StepRow:
    stats = {f"server/{name}_s": seconds for name, seconds in counters.items()}
    return StepRow(step, 10.0 * step, {**stats, "server/servers": 2.0})


def test_the_servers_time_by_cause():
    """Two servers, 10 s a step: 20 s of servers, of which the rollout had no episode for 2 * 3."""
    rows = []
    for i in range(4):
        row = server_row(i, busy=4.0 * i, no_request=9.0 * i, control=3.0 * i, paused=2.0 * i)
        row.stats["rollout/idle_s"] = 3.0 * i
        rows.append(row)
    shares = {share.cause: share.share for share in server_time(rows)}
    assert shares == pytest.approx(
        {
            "generating": 4 / 20,
            "no episode may start": 6 / 20,
            "episodes ask for nothing": 3 / 20,
            "loading weights": 3 / 20,
            "paused": 2 / 20,
            "other": 2 / 20,
        }
    )
    assert server_time(rows[:1]) == []


def test_the_time_of_a_replaced_server_is_left_out():
    rows = [server_row(i, busy=4.0 * i) for i in range(3)]
    shares = {share.cause: share.share for share in server_time(rows)}
    assert shares == pytest.approx({"generating": 0.2, "not generating": 0.8})
    replaced = [server_row(3, busy=1.0), server_row(4, busy=5.0)]  # it counts from 0 again
    again = server_time([*rows, *replaced])
    assert sum(share.seconds for share in again) == pytest.approx(3 * 20)
    assert {share.cause: share.share for share in again} == pytest.approx(shares)


def test_the_rollouts_time_by_cause(tmp_path):
    """As episodes spent theirs; a prompt runs until its slowest sample has ended."""
    spent = {"episode": 4.0, "generation": 2.0, "first_token": 0.5, "tool": 1.0, "reward": 0.25}
    stats = {f"rollout/{name}_s": seconds for name, seconds in spent.items()}
    counts = {f"{name}__count": 4.0 for name in stats}
    run = WrittenRun(tmp_path, steps=3, **stats, **counts)
    with run.database.transaction() as connection:
        connection.execute(
            "UPDATE tasks SET issued_at = 100, finished_at = 105, closed_at = 115 "
            "WHERE state = 'trained'"
        )
    run.close()
    with RunReader(tmp_path) as reader:
        found = time_by_cause(reader)
    assert found is not None
    shares = {share.cause: share.share * 15 for share in found.rollout}
    assert shares == pytest.approx(
        {
            "finished, waiting for its step": 10,
            "generating tokens": 2,
            "tools": 1,
            "waiting for the group's slowest sample": 1,
            "waiting for the first token": 0.5,
            "rewards": 0.25,
            "the workflow's own code": 0.25,
        }
    )
    assert "finished, waiting for its step, 67%" in found.verdicts[2]


@pytest.mark.parametrize(
    ("kind", "section"),
    [("native", NativeServerConfig), ("vllm", vLLMConfig), ("sglang", SGLangConfig)],
)
def test_advice_names_keys_of_the_servers_in_use(tmp_path, kind, section):
    spent = {"rollout/episode_s": 4.0, "rollout/first_token_s": 4.0}
    config = CONFIG.replace("rollout: {", f"rollout: {{backend: '{kind}:d1', ")
    run = WrittenRun(tmp_path, steps=3, config=config)
    for step in range(40):
        stats = {"timeperf/step": 1.0, "server/restarts": float(step), **spent}
        run.database.record_step(step, stats)
    with run.database.transaction() as connection:
        connection.execute(
            "UPDATE tasks SET issued_at = 1, finished_at = 5, closed_at = 5 WHERE step IS NOT NULL"
        )
    run.close()
    with RunReader(tmp_path) as reader:
        found, alarms = time_by_cause(reader), find_alarms(reader)
    assert found is not None
    assert "waiting for the first token, 100%" in found.verdicts[-1]
    (replaced,) = (alarm.advice for alarm in alarms if alarm.kind == "servers replaced")
    for advice in (found.verdicts[-1], replaced):
        keys = re.findall(r"\b(native|vllm|sglang)\.(\w+)", advice)
        assert keys and all(of == kind and hasattr(section, key) for of, key in keys), keys


def test_every_loss_says_what_to_change():
    rows = [server_row(i, busy=1.0 * i, paused=2.0 * i, offloaded=1.0 * i) for i in range(3)]
    for shares in (server_time(rows), trainer_time([StepRow(0, 1.0, {"timeperf/step": 1.0})])):
        assert all(share.advice for share in shares if share.is_loss)
