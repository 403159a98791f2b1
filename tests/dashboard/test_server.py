"""The dashboard's server over HTTP: who may ask, what is answered, and that it only reads."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from dashboard_world import TOKEN, Dash, WrittenRun, write_evaluation


@pytest.fixture(scope="module")
def dash(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    WrittenRun(root / "math" / "first").finish()
    alive = WrittenRun(root / "math" / "second", steps=2)
    (root / "math" / "third").mkdir()
    (root / "math" / "third" / "run.db").write_bytes(b"no database " * 500)
    write_evaluation(root / "eval.db")
    (root / "math" / "eval.db").write_bytes(b"no database " * 500)
    dash = Dash(root)
    yield dash
    dash.close()
    alive.close()


def test_the_link_gives_a_cookie_and_nothing_else_does(dash):
    assert dash.ask("/", cookie=None)[0].status == 401
    assert dash.ask("/api/runs", cookie=None)[0].status == 401
    assert dash.ask("/api/runs", cookie="wrong")[0].status == 401
    assert dash.ask(f"/api/runs?token={TOKEN}", cookie=None)[0].status == 401
    assert dash.ask("/?token=wrong", cookie=None)[0].status == 401
    reply, _ = dash.ask(f"/?token={TOKEN}", cookie=None)
    assert reply.status == 303 and reply.headers["location"] == "/"
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert TOKEN not in dash.ask("/")[1].decode()


def test_foreign_host_names_are_refused(dash):
    own = f"127.0.0.1:{dash.port}"
    for host in ("evil.example", f"evil.example:{dash.port}", "127.0.0.1", f"{own}1"):
        assert dash.ask("/api/runs", host=host)[0].status == 421
    assert dash.ask("/api/runs", host=f"localhost:{dash.port}")[0].status == 200


def test_it_only_reads(dash):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert dash.ask("/api/runs", method=method)[0].status == 405


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/runs", "/api/none"])
def test_every_reply_carries_the_policy(dash, path):
    reply, _ = dash.ask(path)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


def test_all_runs_are_listed_also_unreadable_ones(dash):
    status, runs = dash.get("runs")
    assert status == 200
    assert [run["name"] for run in runs] == ["math/first", "math/second", "math/third"]
    assert runs[0]["state"] == "finished" and runs[2]["state"] == "unreadable"
    assert dash.get("run/2/now")[0] == 503


@pytest.mark.parametrize(
    "path",
    [
        "run/0/now",
        "run/1/seconds?last=5",
        "run/0/samples?min_reward=0.5&text=a&limit=3",
        "run/0/prompts?state=failed",
        "run/0/prompt/0",
        "run/0/step/1",
        "run/0/sample/4/1",
        "run/0/curves",
        "run/0/keys",
        "run/0/config",
        "run/0/alarms",
        "diff?first=0&second=1",
    ],
)
def test_views_answer(dash, path):
    status, value = dash.get(path)
    assert status == 200 and value is not None


def test_evaluations_and_their_samples(dash):
    _, (first, second) = dash.get("evals")
    assert second["evaluations"] == [] and "is it a database of areal eval?" in second["fault"]
    (found,) = first["evaluations"]
    assert (found["target"], found["suite"], found["step"]) == ("final model", "arithmetic", 7)
    assert (found["problems"], found["samples"], found["tokens"]) == (2, 3, 3)
    assert found["reward"] == 0.5  # of three: the failed one counts as 0
    assert found["counts"] == {"failed": 1, "scored": 1, "truncated": 1}
    for query, places in (
        ("", [(0, 0), (0, 1), (1, 0)]),
        ("&state=failed", [(0, 1)]),
        ("&min_reward=0.6", [(0, 0)]),
        ("&max_reward=0.6", [(1, 0)]),
        ("&text=8%20%2B", [(1, 0)]),
        ("&offset=1&limit=1", [(0, 1)]),
    ):
        _, reply = dash.get(f"eval/0/results?evaluation=e1{query}")
        assert [(one["row"], one["sample"]) for one in reply["results"]] == places, query
    assert dash.get("eval/0/results?evaluation=other")[1]["results"] == []


def test_hostile_values_of_an_evaluation(tmp_path):
    write_evaluation(tmp_path / "eval.db")
    with closing(sqlite3.connect(tmp_path / "eval.db")) as connection, connection:
        connection.execute("UPDATE samples SET reward = 9e999 WHERE row = 0")
        connection.execute("UPDATE problems SET data = ? WHERE row = 0", ("[" * 100_000,))
        connection.execute("UPDATE problems SET data = ? WHERE row = 1", (r'{"a": "\ud800"}',))
    dash = Dash(tmp_path)
    try:
        status, (file,) = dash.get("evals")
        assert status == 200 and file["evaluations"][0]["reward"] is None
        status, reply = dash.get("eval/0/results?evaluation=e1")
        assert status == 200 and [one["reward"] for one in reply["results"]] == [None, None, 0.5]
        assert reply["results"][2]["problem"] == r'{"a": "\ud800"}'
    finally:
        dash.close()


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("run/0/samples?min_reward=nan", 400, "min_reward"),
        ("run/0/samples?limit=-1", 400, "limit"),
        ("run/0/samples?state=odd", 400, "trained or finished"),
        ("run/0/prompts?step=1e9", 400, "step"),
        ("run/0/prompts?before=99999999999999999999", 400, "before"),
        ("run/0/prompt/99", 404, "not recorded"),
        ("run/0/sample/4/7", 404, "not recorded"),
        ("run/0/sample/4", 404, "2 numbers"),
        ("run/9/now", 404, "no run"),
        ("run/../now", 404, "no run"),
        ("eval/0/results?state=odd", 400, "scored, truncated"),
        ("eval/0/results?min_reward=inf", 400, "min_reward"),
        ("eval/1/results", 503, "is it a database of areal eval?"),
        ("eval/2/results", 404, "no file"),
        ("nothing", 404, "no such view"),
        ("diff?first=0", 404, "no run"),
    ],
)
def test_a_bad_question_is_answered_by_name(dash, path, status, error):
    found, value = dash.get(path)
    assert found == status and error in value["error"]


def test_the_page_writes_no_markup_and_stays_small(dash):
    parts = [dash.ask(path)[1].decode() for path in ("/", "/app.js", "/style.css")]
    script = parts[1].split("\n", 3)[3]  # after the comment that says so
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http:"):
        assert word not in script.replace("http://www.w3.org/2000/svg", "")
    assert sum(map(len, parts)) < 100_000
