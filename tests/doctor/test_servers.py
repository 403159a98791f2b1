"""`areal doctor` on servers of their own processes: native ones, and one that speaks SGLang's
protocol, which shows neither its weights nor its layers."""

from __future__ import annotations

import pytest
from doctor.test_faults import SMALL, accuses, opened
from sglang_server import sglang_python
from tiny_run import overrides

from areal.cli.demo import recipe_path
from areal.cli.main import main
from areal.doctor.live import examine

pytestmark = pytest.mark.usefixtures("forked_children")


def test_a_config_with_a_native_server_is_healthy(tmp_path, capsys):
    options = [*SMALL, "actor.weight_update_mode=shm"]
    config = [recipe_path("arithmetic_grpo.yaml"), *overrides(tmp_path, *options)]
    assert main(["doctor", *config]) == 0
    *table, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "healthy: no fault in 10 of 12 stages"
    assert table[0].split()[:2] == ["tokenizer", "ok"]
    assert any("weights" in line and "of 1 server(s) are the trainer's" in line for line in table)
    assert not (tmp_path / "arithmetic").exists()  # no run was started there


@pytest.mark.slow
def test_a_server_of_two_ranks_is_compared_by_whole_tensors(tmp_path):
    ranks = ["actor.weight_update_mode=shm", "rollout.backend=native:d1t2"]
    with opened(tmp_path, *ranks) as training:
        chart = examine(training)
        assert chart.exit_code == 0, chart.table()
        found = {one.stage: one for one in chart.findings}
        assert "of 1 server(s) are the trainer's" in found["weights"].found, chart.table()
        assert found["logits"].state == "ok", chart.table()
        training.inference._protocol.load_weights = lambda control, order: None
        accuses(examine(training), "weights", "after an update", "is not the trainer's tensor")


def test_a_stock_server_that_does_not_load_weights_is_named(tmp_path):
    stock = ["actor.weight_update_mode=shm", "rollout.backend=sglang:d1"]
    with opened(tmp_path, *stock, f"sglang.python={sglang_python(tmp_path)}") as training:
        chart = examine(training)
        assert chart.exit_code == 0, chart.table()
        found = {one.stage: one for one in chart.findings}
        assert found["weights"].state == "ok" and found["logits"].state == "ok", chart.table()
        assert "cannot" in found["routing"].found or "does not show" in found["routing"].found
        training.inference._protocol.load_weights = lambda control, order: None
        chart = examine(training)
    accuses(chart, "weights", "did not load the new weights")
