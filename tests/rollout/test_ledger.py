"""The ledger: one state per prompt, nothing ends twice, and a rewind that loses nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_world import trajectory

from areal.rollout.failures import describe
from areal.rollout.ledger import Ledger, Outcome, Resume
from areal.rollout.ledger_balance import read_trained, steps_with_trajectories
from areal.rollout.source import Prompt
from areal.run.database import RunDatabase


@contextmanager
def open_ledger() -> Iterator[tuple[Ledger, RunDatabase]]:
    with tempfile.TemporaryDirectory() as folder, RunDatabase(Path(folder) / "run.db") as db:
        yield Ledger(db), db


def prompts(*task_ids: int) -> list[Prompt]:
    return [Prompt(task_id, epoch=0, row=task_id, data={}) for task_id in task_ids]


def finish(task_id: int, head: int = 0, tail: int = 0) -> Outcome:
    group = trajectory([head, tail], task_id=task_id)
    return Outcome(task_id, "finished", head, head, tail, trajectory=group)


def reject(task_id: int, tail: int = 0) -> Outcome:
    return Outcome(task_id, "rejected", 0, 0, tail, why="filter")


def fail(task_id: int, tail: int = 0) -> Outcome:
    return Outcome(task_id, "failed", 0, 0, tail, why="ValueError: x", error=ValueError("x"))


def states(db: RunDatabase) -> str:
    """One letter per task, in order; F is failed, f finished."""
    letters = {"failed": "F"}
    rows = db.query("SELECT state FROM tasks ORDER BY task_id")
    return "".join(letters.get(row["state"], row["state"][0]) for row in rows)


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_the_reason(text):
    """Of an agent, a reward function, a server: also one that no encoder takes."""
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0, 1), version=0)
        error = ValueError(text)
        ledger.settle([Outcome(0, "failed", 0, 0, 0, why=describe(error), error=error)], version=0)
        ledger.settle([Outcome(1, "rejected", 0, 0, 0, why=text)], version=0)
        db.record_event("stopped", text)
        assert states(db) == "Fr"


def test_every_path_of_a_task():
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0, 1, 2, 3, 4), version=0)
        ledger.settle([finish(0), finish(1), reject(2), fail(3)], version=0)
        ledger.trained([0], step=0, version=0)
        ledger.stale([1], version=3)
        assert states(db) == "tsrFi"
        counts = {state: 1 for state in ("trained", "stale", "rejected", "failed", "issued")}
        assert ledger.balance() == counts | {"finished": 0, "total": 5}
        row = db.query("SELECT * FROM tasks WHERE task_id = 0")[0]
        assert (row["step"], row["closed_version"], row["reward"]) == (0, 0, 1.0)
        assert db.query("SELECT why FROM tasks WHERE state = 'failed'")[0]["why"] == "ValueError: x"
        assert [r["task_id"] for r in db.query("SELECT task_id FROM trajectories")] == [0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: ledger.settle([finish(0), finish(2)], version=0),  # 0 is finished already
        lambda ledger: ledger.trained([0, 1], step=1, version=1),  # 1 is trained already
        lambda ledger: ledger.stale([0, 2], version=1),  # 2 still runs
        lambda ledger: ledger.issue(prompts(3, 1), version=1),  # 1 has ended
        lambda ledger: ledger.trained([0], step=1, version=1, dropped=[2]),  # 2 is not rejected
    ],
)
def test_nothing_ends_twice_and_a_refused_write_changes_nothing(wrong):
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0, 1, 2), version=0)
        ledger.settle([finish(0), finish(1)], version=0)
        ledger.trained([1], step=0, version=0)
        with pytest.raises(RuntimeError, match="were not"):
            wrong(ledger)
        assert states(db) == "fti"
        ledger.balance()


def test_fresh_start():
    with open_ledger() as (ledger, _):
        assert ledger.rewind(-1, 0) == Resume()


def test_rewind_by_hand():
    """Recover point after step 0 (version 1); the run died at version 3."""
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(*range(12)), version=0)
        ledger.settle([finish(0), finish(1, 0, 1), finish(2, 0, 2), finish(3, 1, 1)], version=2)
        ledger.trained([0], step=0, version=0)
        ledger.trained([1], step=1, version=1)  # untrained: its tokens are as old as version 1
        ledger.trained([2], step=2, version=2)  # its last token came from version 2, now gone
        ledger.settle([reject(4, tail=1), reject(5, tail=2)], version=2)
        ledger.settle([fail(6)], version=0)
        ledger.settle([fail(7)], version=2)
        ledger.settle([finish(8), finish(9, 2, 3), finish(10)], version=3)
        ledger.stale([10], version=3)

        resume = ledger.rewind(step=0, version=1)

        assert resume.version == 1 and resume.next_task_id == 12
        assert resume.reissue == [2, 5, 7, 9, 10, 11]
        assert [result.task_id for result in resume.finished] == [1, 3, 8]
        assert [result.task_id for result in resume.rejected] == [4]
        assert states(db) == "tfifriFifiii"
        assert torch.equal(
            resume.finished[1].trajectory["versions"], torch.tensor([[-1, 1, 1]]).int()
        )
        ledger.balance()


def test_dynamic_batches_use_up_rejections():
    with open_ledger() as (ledger, _):
        ledger.issue(prompts(0, 1, 2, 3), version=0)
        ledger.settle([finish(0), reject(1), reject(2)], version=0)
        ledger.trained([0], step=0, version=0, dropped=[1])
        resume = ledger.rewind(step=0, version=1)
        assert [result.task_id for result in resume.rejected] == [2]
        resume = ledger.rewind(step=-1, version=0)
        assert [result.task_id for result in resume.rejected] == [1, 2]


def test_reissue_counts_attempts():
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0), version=0)
        ledger.rewind(-1, 0)
        ledger.issue(prompts(0), version=2)
        row = db.query("SELECT attempts, issued_version FROM tasks")[0]
        assert (row["attempts"], row["issued_version"]) == (2, 2)


def test_prune_keeps_what_a_recover_point_may_need():
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0, 1, 2), version=0)
        ledger.settle([finish(0), finish(1), finish(2)], version=0)
        ledger.trained([0], step=0, version=0)
        ledger.trained([1], step=1, version=1)
        ledger.prune(step=0)
        assert [r["task_id"] for r in db.query("SELECT task_id FROM trajectories")] == [1, 2]
        ledger.balance()
        # A point older than the pruned steps still loses nothing: the task just runs again.
        resume = ledger.rewind(-1, 0)
        assert resume.reissue == [0]
        assert [result.task_id for result in resume.finished] == [1, 2]


def test_the_batch_of_a_step_can_be_read_again_in_its_order():
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0, 1, 2, 3, 4), version=0)
        ledger.settle([finish(task_id) for task_id in (4, 2, 3, 0, 1)], version=0)
        ledger.trained([1, 4], step=0, version=0)
        ledger.trained([0, 2, 3], step=1, version=1)
        stored = dict(db.query("SELECT task_id, data FROM trajectories"))
        with db.transaction() as connection:
            assert read_trained(connection, 1) == [(i, stored[i]) for i in (0, 2, 3)]
            assert steps_with_trajectories(connection) == {0, 1}
        ledger.prune(step=0)
        with db.transaction() as connection:
            assert read_trained(connection, 0) == [(1, None), (4, None)]
            assert steps_with_trajectories(connection) == {1}
            assert read_trained(connection, 2) == []


def test_books_that_do_not_agree_are_found():
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0, 1), version=0)
        ledger.settle([finish(0)], version=0)
        with db.transaction() as connection:
            connection.execute("DELETE FROM trajectories")
        with pytest.raises(RuntimeError, match=r"does not balance.*no trajectory.*\[0\]"):
            ledger.balance()


def test_steps_that_trained_on_nothing_are_found():
    with open_ledger() as (ledger, db):
        ledger.issue(prompts(0, 1, 2, 3), version=0)
        ledger.settle([finish(0), finish(1), finish(2), reject(3)], version=0)
        ledger.trained([0], step=0, version=0)
        ledger.trained([1], step=2, version=2, dropped=[3])
        with pytest.raises(RuntimeError, match=r"does not balance: 1 trained steps.*steps \[2\]"):
            ledger.balance()
        ledger.trained([2], step=1, version=1)
        db.record_step(-1, {"eval": 1.0})
        for step in range(3):
            db.record_step(step, {"loss": 1.0})
        ledger.balance()
        db.record_step(3, {"loss": 1.0})
        with pytest.raises(RuntimeError, match=r"1 recorded steps trained on nothing.*\[3\]"):
            ledger.balance()


def test_a_ledger_that_begins_in_the_middle_of_a_run_is_found():
    """As when the database was lost and the run went on from a later recover point."""
    with open_ledger() as (ledger, _):
        ledger.issue(prompts(0, 1), version=5)
        ledger.settle([finish(0, 5, 5), finish(1, 5, 5)], version=5)
        ledger.trained([0], step=5, version=5)
        ledger.trained([1], step=6, version=6)
        with pytest.raises(RuntimeError, match=r"does not balance.*steps \[5\]"):
            ledger.balance()


@settings(max_examples=25)
@given(st.data())
def test_random_histories_rewind_to_a_state_that_could_have_been(data):
    """After any history and any recover point: nothing lost, nothing of the future kept."""
    with open_ledger() as (ledger, db):
        next_id, version = 0, 0
        issued: list[int] = []
        finished: list[int] = []
        for _ in range(data.draw(st.integers(1, 25))):
            match data.draw(st.sampled_from(["issue", "settle", "settle", "train", "crash"])):
                case "issue":
                    count = data.draw(st.integers(1, 3))
                    new = list(range(next_id, next_id + count))
                    ledger.issue(prompts(*new), version)
                    issued += new
                    next_id += count
                case "settle" if issued:
                    task_id = issued.pop(data.draw(st.integers(0, len(issued) - 1)))
                    kind = data.draw(st.sampled_from([finish, finish, reject, fail]))
                    if kind is finish:
                        outcome = finish(task_id, data.draw(st.integers(0, version)), version)
                        finished.append(task_id)
                    else:
                        outcome = kind(task_id, tail=version)
                    ledger.settle([outcome], version)
                case "train":
                    taken, finished = finished[:2], finished[2:]
                    if taken and data.draw(st.booleans()):
                        ledger.trained(taken, step=version, version=version)
                        version += 1
                    else:
                        ledger.stale(taken, version)
                case "crash":
                    version = data.draw(st.integers(0, version))
                    before = ledger.balance()["total"]
                    resume = ledger.rewind(version - 1, version)
                    assert ledger.balance()["total"] == before == resume.next_task_id == next_id
                    for row in db.query("SELECT * FROM tasks"):
                        if row["state"] in ("finished", "trained", "rejected"):
                            assert row["tail_version"] <= version
                        if row["state"] == "trained":
                            assert row["step"] < version
                    issued = list(resume.reissue)
                    ledger.issue(prompts(*issued), version)
                    finished = [result.task_id for result in resume.finished]
        ledger.balance()


def test_a_step_costs_the_same_however_long_the_run_is():
    """By the instructions SQLite executes, which no other load on the machine changes."""

    def cost_of_a_step(past: int) -> dict[str, int]:
        with open_ledger() as (ledger, db):
            for start in range(0, past, 1000):
                ids = range(start, min(past, start + 1000))
                ledger.issue(prompts(*ids), version=0)
                ledger.settle([finish(i) for i in ids], version=0)
                ledger.stale(ids[::10], version=5)
                ledger.trained([i for i in ids if i not in ids[::10]], step=0, version=0)
            ledger.prune(0)
            count = 0

            def tick() -> None:
                nonlocal count
                count += 1

            ids = range(past, past + 20)
            step = {
                "issue": lambda: ledger.issue(prompts(*ids), version=1),
                "settle": lambda: ledger.settle([finish(i) for i in ids], version=1),
                "stale": lambda: ledger.stale(ids[:2], version=5),
                "trained": lambda: ledger.trained(ids[2:], step=1, version=1),
                "prune": lambda: ledger.prune(1),
            }
            costs = {}
            with db.transaction() as connection:
                connection.set_progress_handler(tick, 1)
            for name, work in step.items():
                count = 0
                work()
                costs[name] = count
            return costs

    young, old = cost_of_a_step(100), cost_of_a_step(5000)
    assert all(old[name] <= 1.2 * young[name] for name in young), (young, old)
