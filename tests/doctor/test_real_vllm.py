"""`areal doctor` on a real, stock vLLM server. Needs `areal env create vllm`; run by
`make test-vllm`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor.test_faults import accuses, opened
from engine.remote.test_vllm_remote import PYTHON, REASON, SETUP_TIMEOUT_S, write_model

from areal.doctor.live import examine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=REASON)]


def test_a_vllm_server_is_healthy_until_something_is_wrong(tmp_path):
    write_model(tmp_path / "tiny_model", seed=1)
    server = [
        "actor.weight_update_mode=disk",
        "rollout.backend=vllm:d1",
        f"vllm.python={PYTHON}",
        "vllm.enforce_eager=true",
        "vllm.cpu_cache_gb=1",
        f"rollout.setup_timeout={SETUP_TIMEOUT_S}",
    ]
    with opened(tmp_path, *server) as training:
        chart = examine(training)
        assert chart.exit_code == 0, chart.table()
        found = {one.stage: one.state for one in chart.findings}
        for stage in ("tokens", "weights", "logits", "sampling", "loss_mask", "optimizer"):
            assert found[stage] == "ok", chart.table()
        config = training.config
        training.config = replace(config, workflow="sick_parts.HotWorkflow")
        accuses(examine(training), "sampling", "temperature 0.5")
        training.config = config
        training.inference._protocol.load_weights = lambda control, order: None
        accuses(examine(training), "weights", "did not load the new weights")
