"""The environments under examples/: what is worth a reward there, and what is a failure."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sandbox_support import needs_sandbox

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)


def play(environment, row, replies):
    """The observations and the sum of rewards; `replies` end the episode."""

    async def episode():
        seen, total, done = [await environment.reset(row)], 0.0, False
        for reply in replies:
            assert not done
            if callable(reply):
                await reply()
                continue
            observation, reward, done = await environment.step(reply)
            seen.append(observation)
            total += reward
        assert done
        if hasattr(environment, "close"):
            await environment.close()
        return seen, total

    return asyncio.run(episode())


def test_a_rare_word_counts_more_than_a_common_one():
    from examples.search.bm25 import BM25

    index = BM25(["the cat", "the dog", "the cow", "cat and the cat"])
    assert index.best("the dog", limit=4) == [1, 0, 2, 3]
    assert index.best("cat", limit=2) == [3, 0]  # twice in a longer one
    assert index.best("cow cat", limit=1) == [2]
    assert index.best("?", limit=3) == index.best("bird", limit=3) == []


def test_a_short_document_comes_before_a_long_one():
    from examples.search.bm25 import BM25

    assert BM25(["red and blue and green", "red"]).best("RED", limit=2) == [1, 0]


def test_two_searches_find_the_answer():
    from examples.search.facts import CODE, NEAR, found, problems
    from examples.search.search import Search

    row = next(r for r in problems("", "train", None) if "k7" in r["messages"][0]["content"])
    other = NEAR["k7"]
    replies = ["search k7", f"Search {other}?", f" {CODE[other]}. "]
    seen, reward = play(Search(), row, replies)
    assert seen == [row["messages"], found("k7"), found(other), ""]
    assert reward == 1.0
    assert play(Search(), row, ["11"])[1] == 0.0


def test_searches_are_counted():
    from examples.search.search import NOTHING, Search

    row = {"messages": [{"role": "user", "content": "?"}], "answer": "search x"}
    seen, reward = play(Search(max_searches=1), row, ["search nowhere", "search x"])
    assert (seen[1], reward) == (NOTHING, 1.0)  # after the last search all is an answer


def test_a_corpus_of_ones_own(tmp_path):
    from examples.search.search import Search

    corpus = tmp_path / "corpus.jsonl"
    lines = [{"title": "Oslo", "text": "a city in Norway"}, {"title": "Norway", "text": "cold"}]
    corpus.write_text("\n".join(map(json.dumps, lines)))
    row = {"messages": [{"role": "user", "content": "?"}], "answer": "cold"}
    environment = Search(corpus=str(corpus), num_results=2, instructions="be brief")
    seen, reward = play(environment, row, ["search norway", "Cold!"])
    assert seen[0][0] == {"role": "system", "content": "be brief"}
    assert seen[1] == "Norway: cold\nOslo: a city in Norway\n"
    assert reward == 1.0
    corpus.with_name("bad.jsonl").write_text('{"title": "x", "text": "y"}\n["half')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: expected a JSON object with title"):
        Search(corpus=str(corpus.with_name("bad.jsonl")))


def scenario(wish: str, status: str) -> int:
    """The seed of one."""
    from examples.customer_service.shop import scenario_of

    for seed in range(1000):
        one = scenario_of(seed)
        if (one.wish, one.orders[one.order]) == (wish, status):
            return seed
    raise AssertionError("no such scenario")


@pytest.mark.parametrize(
    ("wish", "status", "tool", "word", "reward"),
    [
        ("cancel", "open", "cancel", "cancelled", 1.0),
        ("refund", "lost", "refund", "It is refunded.", 1.0),
        ("cancel", "sent", None, "sorry", 1.0),
        ("cancel", "sent", None, "Sorry, it cannot be cancelled.", 1.0),
        ("cancel", "open", "cancel", "Sorry, it is cancelled.", 0.0),
        ("cancel", "sent", "cancel", "cancelled", 0.0),  # obeyed against the policy
        ("refund", "lost", None, "refunded", 0.0),  # promised and not done
        ("cancel", "open", "cancel", "sorry", 0.0),  # done and not told
        ("cancel", "open", "refund", "cancelled", 0.0),
    ],
)
def test_the_database_and_the_message_must_be_right(wish, status, tool, word, reward):
    from examples.customer_service.service import Service
    from examples.customer_service.shop import scenario_of

    seed = scenario(wish, status)
    environment, order = Service(), scenario_of(seed).order

    async def call():
        assert await environment.shop.status(order) == status
        if tool is not None:
            assert await getattr(environment.shop, tool)(order) == "done"

    seen, total = play(environment, {"seed": seed}, ["number?", call, word])
    assert seen[0] == [{"role": "user", "content": f"please {wish} my order."}]
    assert seen[1] == f"{order}."
    assert total == reward


def test_a_user_who_is_told_nothing_leaves():
    from examples.customer_service.service import Service

    assert play(Service(), {"seed": 1}, ["hello", "hm", "so"])[1] == 0.0


def test_a_tool_names_an_order_that_does_not_exist():
    from areal.environments.tools import ToolError
    from examples.customer_service.shop import Shop

    with pytest.raises(ToolError, match="no order 12"):
        asyncio.run(Shop({1: "open"}).cancel(12))


@pytest.fixture
def user_server():
    """Answers with what is in `said`, one after another, and keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        said: list[bytes] = []
        asked: list[dict] = []

        def do_POST(self):
            self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = self.said.pop(0)
            self.send_response(500 if answer == b"down" else 200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Handler.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


def said(text) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_a_model_plays_the_user(user_server):
    from examples.customer_service.service import Service

    user_server.said[:] = [said("My order, please!"), said("It is mine."), said("LEAVE")]
    policy = "examples/customer_service/policy.md"
    environment = Service(policy=policy, user_url=user_server.url, user_model="m")
    seen, reward = play(environment, {"seed": scenario("cancel", "sent")}, ["Which?", "So sorry."])
    assert [message["role"] for message in seen[0]] == ["system", "user"]
    assert seen[1:] == ["It is mine.", ""]
    assert reward == 1.0
    assert [m["content"] for m in user_server.asked[-1]["messages"][-3:]] == [
        "Which?",
        "It is mine.",
        "So sorry.",
    ]


@pytest.mark.parametrize("answer", [b"down", b"{", b"[]", b'{"choices": []}', said(None), said("")])
def test_a_user_that_fails_is_no_user(user_server, answer):
    from areal.environments.interface import EnvError
    from examples.customer_service.service import Service

    user_server.said[:] = [answer]
    environment = Service(user_url=user_server.url)
    with pytest.raises(EnvError, match="user_url"):
        asyncio.run(environment.reset({"seed": 0}))


@needs_sandbox
def test_each_terminal_task_has_its_command():
    from examples.terminal.lessons import COMMANDS
    from examples.terminal.terminal import PROMPT, Terminal, load

    for row in load("", "train", None):
        task = (Path(row["task"]) / "instruction.md").read_text().strip()
        seen, reward = play(Terminal(), row, [COMMANDS[task], "exit"])
        assert seen[0] == [{"role": "user", "content": task + PROMPT}]
        assert reward == 1.0, task


@needs_sandbox
def test_the_graders_files_are_its_own():
    from examples.terminal.terminal import PROMPT, Terminal

    row = {"task": "examples/terminal/tasks/sort"}
    cheat = "mkdir tests; echo exit 0 > tests/test.sh; echo 'exit 0' > bash; chmod +x bash"
    seen, reward = play(Terminal(), row, ["ls; cat tests/test.sh", cheat, "exit"])
    assert seen[1].startswith("a\n") and "No such file" in seen[1] and seen[1].endswith(PROMPT)
    assert reward == 0.0


@needs_sandbox
def test_a_task_file_that_is_damaged_is_named(tmp_path):
    from areal.environments.interface import EnvError
    from examples.terminal.terminal import Terminal

    (tmp_path / "instruction.md").write_text("sort a")
    (tmp_path / "task.toml").write_text("[environment]\nmemory_mb = 'much'\n")
    with pytest.raises(EnvError, match=r"task.toml: sandbox.memory_mb must be above 0"):
        asyncio.run(Terminal().reset({"task": str(tmp_path)}))


def test_a_function_is_worth_what_its_tests_say():
    from areal.reward.unit_tests import unit_tests_reward_fn
    from examples.code.functions import problems

    rows = problems("", "train", None)
    row = next(r for r in rows if r["messages"][0]["content"].startswith("divide by "))
    number = row["messages"][0]["content"].removeprefix("divide by ").removesuffix(":")
    right, wrong = f"def f(x):\n return x//{number}", f"def f(x):\n return x*{number}"
    assert unit_tests_reward_fn("", right, [], [], **row) == 1.0
    assert unit_tests_reward_fn("", wrong, [], [], **row) == 0.0
    tested = {r["messages"][0]["content"] for r in problems("", "test", None)}
    assert tested and not tested & {r["messages"][0]["content"] for r in rows}


def test_lessons_learn_replies_alone(tmp_path):
    from areal.dataset.arithmetic import build_char_tokenizer
    from examples.lessons.dialogues import rows_of

    tokenizer = build_char_tokenizer(tmp_path)
    (row,) = rows_of([["ab", "c", "d", "ef"]], tokenizer)
    text = [
        "<eos>" if i == tokenizer.eos_token_id else tokenizer.decode(i) for i in row["input_ids"]
    ]
    assert text == ["a", "b", "c", "<eos>", "d", "e", "f", "<eos>"]
    assert row["loss_mask"] == [0, 0, 1, 1, 0, 1, 1, 1]
