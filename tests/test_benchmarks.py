"""The benchmarks run and report their rows; how fast anything is, is not asserted here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli_process import python_file
from forked_children import fork_children

from areal.cli.demo import make_model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmark"
KEYS = {"rows", "machine", "date", "commit"}


@pytest.fixture
def forked():
    """Not for what is measured of the memory of servers: their processes are small clients."""
    with fork_children():
        yield


def run(script: str, *arguments: str | Path) -> None:
    ended = python_file(BENCHMARKS / script, *arguments)
    assert ended.code == 0, ended.err[-3000:]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_async_speedup_compares_both_arms(tmp_path):
    make_model(tmp_path / "model")
    report = tmp_path / "report.json"
    options = ("--steps", "1", "--only", "env", "--model", tmp_path / "model", "--json", report)
    run("async_speedup.py", *options)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS
    rows = {row["name"]: row["value"] for row in written["rows"]}
    arms = rows["env_staleness_2"] / rows["env_staleness_0"]
    assert rows["speedup_env"] == pytest.approx(arms) and arms > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_smollm2_reports_accuracy_and_draws_it_again(tmp_path):
    make_model(tmp_path / "model")
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    data = BENCHMARKS.parent / "tests" / "data" / "chain_sum_sample"
    small = ("total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=2")
    on_cpu = ("actor.weight_update_mode=direct", "native.num_pages=64", "gconfig.max_new_tokens=4")
    options = ("--model", tmp_path / "model", "--data", data, "--runs", tmp_path, "--json", report)
    run("smollm2.py", *options, *small, *on_cpu)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS | {"overrides", "curve"}
    rows = {row["name"]: row["value"] for row in written["rows"]}
    assert rows["steps"] == 2 and rows["throughput"] > 0 and 0 <= rows["accuracy_after"] <= 1
    assert [point["step"] for point in written["curve"]] == [0, 1, 2]
    run("smollm2.py", "--results", report, "--plot", plot)
    assert plot.stat().st_size


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_algorithms_keeps_what_is_done_and_draws_it_again(tmp_path):
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    small = ("--steps", "1", "--only", "grpo", "--staleness", "2", "--cpu")

    def measure(model: Path) -> tuple[int, dict]:
        options = ("--model", model, *small, "--json", report)
        ended = python_file(BENCHMARKS / "algorithms.py", *options)
        written = json.loads(report.read_text())
        assert written.keys() == KEYS | {"steps", "curves", "errors"}
        return ended.code, written

    missing, model = tmp_path / "missing", tmp_path / "model"
    code, written = measure(missing)
    assert code == 1 and [row["name"] for row in written["rows"]] == ["grpo_staleness_2_failed"]
    assert all("missing" in error for error in written["errors"].values())

    make_model(model)
    code, written = measure(model)
    assert code == 0 and [row["name"] for row in written["rows"]] == ["grpo_staleness_2_accuracy"]
    assert written["errors"] == {}

    assert measure(missing) == (0, written), "finished runs are not repeated"
    run("algorithms.py", "--results", report, "--plot", plot, "--curves", tmp_path / "curves")
    assert plot.stat().st_size and (tmp_path / "curves" / "grpo.png").stat().st_size


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_recipe_curves_draws_what_a_recipe_follows(tmp_path):
    make_model(tmp_path / "demo" / "arithmetic" / "sft" / "model")
    report, curves = tmp_path / "report.json", tmp_path / "curves"
    small = ("total_train_steps=2", "train_dataset.batch_size=4", "evaluator.freq_steps=1")
    options = ("--demo", tmp_path / "demo", "--curves", curves, "--json", report)
    run("recipe_curves.py", *options, "--only=dpo", *small)
    rows = {row["name"]: row["value"] for row in json.loads(report.read_text())["rows"]}
    assert rows.keys() == {"dpo_before", "dpo_after"} and 0 <= rows["dpo_after"] <= 1
    assert (curves / "dpo.png").stat().st_size


@pytest.mark.slow
def test_tree_training_computes_less_and_learns_the_same(tmp_path):
    report = tmp_path / "report.json"
    run("tree_training.py", "--tiny", "--steps", "1", "--json", report)
    rows = {row["name"]: row["value"] for row in json.loads(report.read_text())["rows"]}
    for name, ratio in {"16x2k": 1 / 4, "agent_4x8": 17 / 104}.items():
        assert rows[f"tree_speedup_{name}"] > 0
        assert rows[f"tree_speedup_{name}_token_ratio"] == pytest.approx(ratio)
        assert rows[f"tree_speedup_{name}_logprob_difference"] < 1e-4
        assert rows[f"tree_speedup_{name}_grad_norm_ratio"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_training_reports_every_row(tmp_path):
    report = tmp_path / "report.json"
    run("training.py", "--tiny", "--eager", "--repeats", "1", "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS
    rows = {row["name"]: row["value"] for row in written["rows"]}
    for name in ("8x2048", "4x8192_ckpt", "1x32768_full", "logprob_64k"):
        assert rows[name] > 0 and 0 < rows[f"{name}_share"] < 1
    assert {"peak_extra", "peak_extra_head", "attention_mixed_ours"} <= rows.keys()


@pytest.mark.slow
def test_vision_compares_images_with_text(tmp_path):
    report = tmp_path / "report.json"
    run("vision.py", "--tiny", "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS
    rows = {row["name"]: row["value"] for row in written["rows"]}
    assert rows["image_tokens"] == 16  # 112 pixels: four merged patches a side
    of = {"generate": "image", "generate_prefill": "image", "train_group": "", "train_apart": ""}
    for name, arm in of.items():
        seeing = rows[f"{name}_{arm}" if arm else name]
        text = rows[f"{name}_text" if arm else "train_text"]
        assert rows[f"{name}_ratio"] == pytest.approx(seeing / text) and text > 0


@pytest.mark.slow
def test_rl_single_gpu_reports_both_halves_and_the_loop(tmp_path):
    report = tmp_path / "report.json"
    run("rl_single_gpu.py", "--tiny", "--steps", "1", "--json", report)
    rows = {row["name"]: row["value"] for row in json.loads(report.read_text())["rows"]}
    assert rows["ceiling"] < min(rows["generate_alone"], rows["train_alone"])
    assert rows["staleness_0"] > 0 and rows["staleness_2"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_controller_reports_what_it_carries_with_and_without_workers(tmp_path):
    report = tmp_path / "report.json"
    small = ("--scale", "0.05", "--seconds", "2", "--repeats", "1", "--workers", "0", "1")
    run("controller.py", "--only", "full", *small, "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS
    rows = {row["name"]: row["value"] for row in written["rows"]}
    for name in ("full", "full_1_workers"):
        assert rows[f"{name}_samples"] > 0 and 0 < rows[f"{name}_episodes"] <= 500
        assert 0 <= rows[f"{name}_lag_p50"] <= rows[f"{name}_lag_p99"]
        shares = [value for row, value in rows.items() if row.startswith(f"{name}_share")]
        assert sum(shares) - rows[f"{name}_share_idle"] == pytest.approx(1)


@pytest.mark.slow
def test_ledger_reports_how_a_step_grows_with_the_run(tmp_path):
    report = tmp_path / "report.json"
    run("ledger.py", "--rows", "20000", "--steps", "2", "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS
    rows = {row["name"]: row["value"] for row in written["rows"]}
    assert rows["ratio"] == pytest.approx(rows["old_step"] / rows["young_step"])
    assert rows["old_prune"] > 0 and rows["old_rewind"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_chaos_survives_its_faults_and_keeps_what_is_done(tmp_path):
    """Tests of the trainer have kills of the other kinds."""
    report = tmp_path / "report.json"
    faults = ("--faults", "2", "--seed", "86")  # a run with rollout workers
    run("chaos.py", *faults, "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS | {"seed", "faults"}
    targets = sorted(fault["target"] for fault in written["faults"])
    assert targets == ["everything", "rollout worker"]
    assert all(fault["recovery_s"] > 0 for fault in written["faults"])
    run("chaos.py", *faults, "--json", report)  # at once: nothing is left
    assert json.loads(report.read_text()) == written


@pytest.mark.slow
def test_memory_reports_the_growth_of_both_processes(tmp_path):
    report = tmp_path / "report.json"
    run("memory.py", "--steps", "40", "--every", "0.02", "--bound", "500", "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS | {"bound", "samples"}
    rows = {row["name"]: row["value"] for row in written["rows"]}
    for process in ("controller", "server"):
        warm, end = rows[f"{process}_warm"], rows[f"{process}_end"]
        assert warm > 50 and rows[f"{process}_growth"] == pytest.approx(end - warm)
    assert 0 < len(written["samples"]) <= 100


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_weight_sync_reports_every_transport(tmp_path):
    report = tmp_path / "report.json"
    run("weight_sync.py", "--tiny", "--repeats", "1", "--json", report)
    rows = {row["name"]: row["value"] for row in json.loads(report.read_text())["rows"]}
    for kind in ("direct", "shm", "xccl", "disk", "delta"):
        assert rows[f"{kind}_seconds"] > 0 and rows[f"{kind}_stall_ms"] >= 0
    assert rows["delta_mb"] < rows["disk_mb"] / 5 and 0 < rows["delta_changed"] < 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_fp8_noise_is_of_the_layers_in_fp8(tmp_path):
    make_model(tmp_path / "model")
    report, every = tmp_path / "report.json", "attention,feed_forward"
    small = ("--texts", "3", "--length", "20", "--leave-out", "attention", every)
    run("fp8_noise.py", "--model", tmp_path / "model", *small, "--json", report)
    written = json.loads(report.read_text())
    assert written.keys() == KEYS
    rows = {row["name"]: row["value"] for row in written["rows"]}
    assert max(rows[f"{every}_logprob"], rows[f"{every}_ratio"]) < 1e-5 < rows["plain_ratio"]
    assert rows[f"{every}_gradient"] == pytest.approx(1)
    for name in ("all", "attention"):
        assert min(rows[f"{name}_logprob"], rows[f"{name}_ratio"]) > 1e-4
        assert 0.5 < rows[f"{name}_gradient"] < 1


@pytest.mark.parametrize("committed", sorted((BENCHMARKS / "results").glob("fp8_curves*.json")))
def test_fp8_curves_reads_what_it_wrote(committed, tmp_path):
    report, written = tmp_path / "report.json", json.loads(committed.read_text())
    run("fp8_curves.py", "--results", committed, "--json", report)
    again = json.loads(report.read_text())
    for key in ("rows", "curves", "steps"):
        assert again[key] == written[key]


def test_peers_says_where_trl_is_missing(tmp_path):
    bare = tmp_path / "python"  # without site-packages there is no TRL, whatever is installed
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    for python, message in ((tmp_path / "none", "No such file"), (bare, "has no TRL: install trl")):
        ended = python_file(BENCHMARKS / "peers.py", "--trl-python", python)
        assert ended.code == 2 and message in ended.err
