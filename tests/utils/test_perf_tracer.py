"""Spans in threads, tasks and processes; files that survive a kill; one merged Chrome trace."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time

import pytest

from areal.api.workflow_context import episode
from areal.utils import perf_tracer, stats_tracker
from areal.utils.perf_tracer import (
    MergedTrace,
    atrace_scope,
    enter_stage,
    episode_scope,
    instant,
    merge_traces,
    phase,
    read_trace,
    trace_generation,
    trace_perf,
    trace_scope,
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "traces" / "controller.jsonl"
    perf_tracer.start(path, process="controller")
    yield path
    perf_tracer.stop()
    stats_tracker.export()


def spans(path, ph="X") -> list[dict]:
    perf_tracer.save()
    return [event for event in read_trace(path) if event["ph"] == ph]


def test_phase_records_statistic_and_span(trace):
    with phase("rollout", step=3):
        time.sleep(0.01)
    (span,) = spans(trace)
    assert (span["name"], span["cat"], span["args"]) == ("rollout", "compute", {"step": 3})
    assert span["dur"] >= 10_000
    assert abs(span["ts"] / 1e6 - time.time()) < 60  # wall clock, so processes line up
    assert stats_tracker.export()["timeperf/rollout"] == pytest.approx(span["dur"] / 1e6, abs=5e-3)


def test_phase_is_timed_without_tracing():
    with phase("untraced"), trace_scope("nothing"):
        instant("nothing")
    assert stats_tracker.export()["timeperf/untraced__count"] == 1


def test_nested_spans_and_exceptions(trace):
    with pytest.raises(KeyError), trace_scope("outer"), trace_scope("inner", "io"):
        raise KeyError
    inner, outer = spans(trace)
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_calls_of_a_decorated_function_are_spans(trace):
    @trace_perf("reward", category="compute")
    def double(number):
        return 2 * number

    @trace_perf("episode", "instr")
    async def episode():
        async with atrace_scope("turn", "io", number=1):
            return double(2)

    assert double(1) == 2 and asyncio.run(episode()) == 4
    assert [span["name"] for span in spans(trace)] == ["reward"]
    in_task = [(event["name"], event["ph"]) for event in read_trace(trace) if event["ph"] in "be"]
    assert sorted(in_task) == sorted((n, ph) for n in ("episode", "reward", "turn") for ph in "be")


def test_threads_are_told_apart_by_name(trace):
    def work() -> None:
        with trace_scope("side"):
            pass

    with trace_scope("main"):
        thread = threading.Thread(target=work, name="EngineLoop")
        thread.start()
        thread.join()
    by_name = {event["name"]: event for event in spans(trace)}
    assert by_name["main"]["tid"] != by_name["side"]["tid"]
    names = {e["tid"]: e["args"]["name"] for e in spans(trace, "M") if e["name"] == "thread_name"}
    assert names[by_name["side"]["tid"]] == "EngineLoop"


def test_interleaved_tasks_become_async_pairs(trace):
    async def episode(seconds: float) -> None:
        with trace_scope("episode"):
            await asyncio.sleep(seconds)

    async def main() -> None:
        await asyncio.gather(episode(0.02), episode(0.01))

    asyncio.run(main())
    begins, ends = spans(trace, "b"), spans(trace, "e")
    assert not spans(trace)
    assert {e["id"] for e in begins} == {e["id"] for e in ends} and len(begins) == 2
    assert max(e["ts"] for e in begins) < min(e["ts"] for e in ends)


def test_many_events_are_written_before_save(trace):
    for _ in range(5000):
        instant("tick")
    assert len(read_trace(trace)) >= 4096
    assert len(spans(trace, "i")) == 5000


def test_traces_of_two_processes_merge_in_time_order(trace, tmp_path):
    with trace_scope("first"):
        code = (
            "import sys\nfrom areal.utils import perf_tracer\n"
            "perf_tracer.start(sys.argv[1], process='server')\n"
            "with perf_tracer.trace_scope('second'): pass\n"
            "perf_tracer.stop()\n"
        )
        server = trace.with_name("server.jsonl")
        subprocess.run([sys.executable, "-c", code, str(server)], check=True, timeout=900)
    perf_tracer.save()
    with server.open("a") as file:
        file.write('{"ph": "X", "na')  # a process killed while it wrote
    merged = merge_traces(trace.parent, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert merged == MergedTrace(len(events), ["controller", "server"])
    by_name = {e["name"]: e for e in events if e["ph"] == "X"}
    assert by_name.keys() == {"first", "second"}
    assert by_name["first"]["pid"] != by_name["second"]["pid"]
    first, second = by_name["first"], by_name["second"]
    assert first["ts"] < second["ts"] < first["ts"] + first["dur"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"controller", "server"}


def test_merge_without_traces_says_how_to_get_some(tmp_path):
    with pytest.raises(FileNotFoundError, match="perf_tracer.enabled=true"):
        merge_traces(tmp_path, tmp_path / "out.json")


def test_second_start_appends(tmp_path):
    path = tmp_path / "controller.jsonl"
    for name in ("before", "after"):
        perf_tracer.start(path, process="controller")
        instant(name)
        perf_tracer.stop()
    assert [e["name"] for e in read_trace(path) if e["ph"] == "i"] == ["before", "after"]


def test_stages_of_a_lane_follow_each_other(trace):
    enter_stage(["prompt 1", "prompt 2"], "queued")
    enter_stage(["prompt 1"], "rollout")
    enter_stage(["prompt 1", "prompt 3"], None)  # the third was in no stage
    pairs = [
        (e["id2"]["global"], e["name"], e["ph"]) for e in spans(trace, "b") + spans(trace, "e")
    ]
    wanted = [("prompt 1", name) for name in ("queued", "rollout")]
    assert sorted(pairs) == sorted((*pair, ph) for pair in wanted for ph in "be")


def test_spans_of_an_episode_are_in_its_lane(trace):
    with episode_scope("nowhere"):
        pass
    with episode(task_id=4, sample=1, is_eval=False, run_seed=0), episode_scope("reward"):
        trace_generation(time.perf_counter() - 2.0, time.perf_counter(), ttft=0.5)
    with episode(task_id=4, sample=0, is_eval=True, run_seed=0, is_group=True):
        trace_generation(time.perf_counter() - 1.0, time.perf_counter(), ttft=0.0)
    begun = {(e["id2"]["global"], e["name"]): e["ts"] for e in spans(trace, "b")}
    ended = {(e["id2"]["global"], e["name"]): e["ts"] for e in spans(trace, "e")}
    seconds = {key: (ended[key] - begun[key]) / 1e6 for key in begun}
    assert seconds.keys() == {
        ("prompt 4.1", "prompt"),
        ("prompt 4.1", "tokens"),
        ("prompt 4.1", "reward"),
        ("eval 4", "tokens"),
    }
    assert seconds["prompt 4.1", "prompt"] == pytest.approx(0.5)
    assert seconds["prompt 4.1", "tokens"] == pytest.approx(1.5, abs=0.1)


def test_a_process_below_a_traced_run_writes_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv(perf_tracer.FOLDER_VARIABLE, str(tmp_path))
    perf_tracer.start_below("actor/0")
    try:
        with trace_scope("train_batch"):
            pass
    finally:
        perf_tracer.stop()
    (file,) = tmp_path.glob("actor_0-*.jsonl")
    assert [event["name"] for event in read_trace(file) if event["ph"] == "X"] == ["train_batch"]


def test_spans_of_another_process_have_a_name_and_never_overlap(trace):
    """What is asked for twice, because a call and its answer cross, is drawn once."""
    perf_tracer.add_spans("server a", "generate", [(1.0, 2.0), (3.0, 5.0)])
    perf_tracer.add_spans("server a", "generate", [(4.0, 6.0), (7.0, 8.0)])
    perf_tracer.add_spans("server b", "generate", [(1.0, 2.0)])
    found = [(one["pid"], one["ts"] / 1e6, one["dur"] / 1e6) for one in spans(trace)]
    (a, *_), (b, *_) = found[0], found[-1]
    assert found == [(a, 1, 1), (a, 3, 2), (a, 5, 1), (a, 7, 1), (b, 1, 1)]
    named = {(one["pid"], one["name"]) for one in spans(trace, "M")}
    kinds = ("process_name", "thread_name")
    assert {(pid, kind) for pid in (a, b) for kind in kinds} <= named


def test_lines_that_are_no_events_are_left_out(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(
        b'[1]\n{"ph": "i", "ts": "soon"}\n\xff\xfe\n{"ph": "i", "ts": 1, "name": "a"}\n'
    )
    assert [event["name"] for event in read_trace(file)] == ["a"]
    merge_traces(tmp_path, tmp_path / "out.json")


def test_a_trace_that_cannot_be_written_stops_nobody(tmp_path, caplog):
    path = tmp_path / "controller.jsonl"
    perf_tracer.start(path, process="controller")
    path.mkdir()  # as a full disk would: nothing can be appended
    try:
        for _ in range(2):
            with trace_scope("work"):
                pass
            perf_tracer.save()
    finally:
        perf_tracer.stop()
    assert caplog.text.count("events are lost") == 1
