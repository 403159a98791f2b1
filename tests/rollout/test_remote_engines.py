"""Engines that scripts build from a config: finding servers, starting them, episodes on them."""

from __future__ import annotations

import pytest
from sglang_server import read_weights, sglang_python
from tiny import write_tiny_model

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.engine_api import WeightUpdateMeta
from areal.dataset.arithmetic import build_char_tokenizer
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.weight_sync.publication import publish
from areal.workflow import RLVRWorkflow

pytestmark = pytest.mark.usefixtures("forked_children")

ROWS = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": "7"} for n in range(4)]


@pytest.fixture
def config():
    return InferenceEngineConfig(request_timeout=60, consumer_batch_size=4, request_retries=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, vocab_size=len(build_char_tokenizer(folder)))


def test_a_server_is_launched_used_updated_and_ended(config, model, tmp_path, monkeypatch):
    kwargs = {
        "reward_fn": "sample_rewards.digit_share_reward_fn",
        "gconfig": GenerationHyperparameters(max_new_tokens=4),
        "tokenizer": str(model),
    }
    rollout = RemoteSGLangEngine(config)
    python = str(sglang_python(tmp_path))
    server = rollout.launch_server({"model_path": model, "python": python, "dtype": "float32"})
    try:
        rollout.initialize()
        assert len(rollout.rollout_batch(ROWS, RLVRWorkflow, kwargs)) == len(ROWS)
        meta = WeightUpdateMeta.from_disk(tmp_path / "weights").with_version(1)
        publish(read_weights(model), meta.path, meta.version)
        rollout.update_weights_from_disk(meta).result(timeout=900)
        rollout.set_version(1)
        (trajectory,) = rollout.rollout_batch(ROWS[:1], RLVRWorkflow, kwargs)
        assert trajectory["versions"].max() == 1

        # Another client of the same server, which it finds by the variable.
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", f"{server.host}:{server.port}")
        monkeypatch.setenv("AREAL_SERVER_TOKEN", rollout._token)
        other = RemoteSGLangEngine(config)
        other.initialize(train_data_parallel_size=2)
        assert len(other.rollout_batch(ROWS[:2], RLVRWorkflow, kwargs)) == 2
        other.destroy()
    finally:
        rollout.destroy()
    assert server.process.poll() is not None


@pytest.mark.parametrize("engine_class", [RemoteSGLangEngine, RemotevLLMEngine])
def test_servers_that_are_not_known(engine_class, config, monkeypatch):
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    engine = engine_class(config)
    assert not engine.initialized
    with pytest.raises(ValueError, match="addr: no server is known; give addr='host:port'"):
        engine.initialize()
    with pytest.raises(RuntimeError, match="call initialize"):
        engine.submit({}, RLVRWorkflow)
    with pytest.raises(ValueError, match=f"server_args: {engine_class.model_key} must name"):
        engine.launch_server({})
    engine.destroy()


def test_ranks_that_cannot_share_a_batch(config):
    with pytest.raises(ValueError, match="3 ranks cannot share rollout.consumer_batch_size=4"):
        RemoteSGLangEngine(config).initialize(addr="127.0.0.1:1", train_data_parallel_size=3)
