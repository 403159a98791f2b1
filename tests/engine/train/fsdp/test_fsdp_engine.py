"""FSDPEngine on one rank: parity with Archon and transformers, saves, resuming, critics, a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_world import (
    PLAIN_SGD,
    assert_close,
    loss_fn,
    loss_tokens,
    make_batch,
    open_engine,
    weights_of,
)
from tiny import tiny_config, write_tiny_model
from tiny_run import grpo_config, query
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from areal.api.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal.engine import train_engine_class
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment

DEEPSEEK = {  # keys and values of another width
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": None, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def transformers_logprobs(model, batch: dict) -> torch.Tensor:
    """[B, S] by transformers, one row at a time."""
    out = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][row : row + 1, :length].long()
        logp = model(input_ids=ids).logits[0].log_softmax(-1)
        out[row, : length - 1] = logp[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return out


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("llama", {}),
    ],
)
def test_loss_and_gradients_equal_archon_and_transformers(tmp_path, family: str, changes: dict):
    folder = write_tiny_model(tmp_path, family, **changes)
    batch, spec = make_batch(), MicroBatchSpec(max_tokens_per_mb=15)
    ours, archon = (
        open_engine(folder, backend, optimizer=PLAIN_SGD, mb_spec=spec, logprobs_chunk_size=7)
        for backend in ("fsdp:d1", "archon:d1")
    )
    torch.testing.assert_close(ours.forward_batch(batch), archon.forward_batch(batch))
    ours_stats, archon_stats = (
        engine.train_batch(batch, loss_fn, loss_tokens) for engine in (ours, archon)
    )
    assert ours_stats == pytest.approx(archon_stats, rel=1e-5)
    # One step of plain SGD with rate 0.1: a tenth of the gradient is what moved.
    assert_close(weights_of(ours), weights_of(archon), atol=1e-6)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    mask = batch["loss_mask"]
    loss = -(transformers_logprobs(model, batch) * mask).sum() / mask.sum()
    loss.backward()
    assert ours_stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    stepped = {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters()}
    assert_close(weights_of(ours), stepped, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 4}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("granite", {"attention_multiplier": 0.3}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("deepseek_v2", DEEPSEEK),
    ],
)
def test_families_archon_does_not_need_to_know(tmp_path, family: str, changes: dict):
    shared = tiny_config("llama")
    for key in ("model_type", "architectures", "dtype"):
        shared.pop(key)
    config = AutoConfig.for_model(family, **{**shared, "sliding_window": 4, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    engine, batch = open_engine(tmp_path), make_batch()
    with torch.no_grad():
        expected = transformers_logprobs(model, batch)
    predicts = batch["attention_mask"].roll(-1, 1)
    predicts[:, -1] = False
    torch.testing.assert_close(
        engine.forward_batch(batch) * predicts, expected, rtol=1e-4, atol=1e-4
    )
    saved = tmp_path / "saved"
    engine.save(SaveLoadMeta(path=str(saved), weight_format="hf"))
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for name, weight in again.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gemma2", {"query_pre_attn_scalar": 8}, "softcap"),
        ("mamba", {"state_size": 4}, "MambaForCausalLM"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
            "Lfm2ForCausalLM has layers of conv, which mix tokens other than by attention",
        ),
        ("cohere", {"logit_scale": 0.3}, "CohereForCausalLM makes other logits"),
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global"], 2]]}, "attention of its"),
    ],
)
def test_a_model_that_packing_would_change_is_refused(tmp_path, family, changes, says):
    shared = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **{**shared, "num_attention_heads": 4, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says):
        open_engine(tmp_path)


def test_recomputed_blocks_give_the_same_gradients(folder):
    plain, recomputed = (
        open_engine(folder, optimizer=PLAIN_SGD, gradient_checkpointing=flag)
        for flag in (False, True)
    )
    for engine in (plain, recomputed):
        engine.train_batch(make_batch(), loss_fn, loss_tokens)
    assert_close(weights_of(plain), weights_of(recomputed), atol=0.0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so, and computes
def test_bfloat16_keeps_float32_masters(folder):
    engine = open_engine(folder, optimizer=OptimizerConfig(lr=1e-6), dtype="bfloat16")
    masters = engine.optimizer.masters()
    before = {name: master.clone() for name, master in masters.items()}
    engine.train_batch(make_batch(), loss_fn, loss_tokens)
    assert {master.dtype for master in masters.values()} == {torch.float32}
    assert any(not torch.equal(before[name], masters[name]) for name in masters)
    assert {weight.dtype for weight in weights_of(engine).values()} == {torch.bfloat16}


def test_a_resumed_run_ends_with_the_same_bits(folder, tmp_path):
    meta = SaveLoadMeta(path=str(tmp_path / "point"), weight_format="dcp", with_optim=True)
    straight, resumed = open_engine(folder), open_engine(folder)
    for number in range(2):
        straight.train_batch(make_batch(number), loss_fn, loss_tokens)
        straight.step_lr_scheduler()
    straight.set_version(2)
    straight.save(meta)
    resumed.load(meta)
    assert resumed.get_version() == 2
    for engine in (straight, resumed):
        engine.train_batch(make_batch(9), loss_fn, loss_tokens)
    assert_close(weights_of(straight), weights_of(resumed), atol=0.0)


def test_a_saved_folder_loads_in_transformers_and_in_archon(folder, tmp_path):
    engine = open_engine(folder)
    engine.train_batch(make_batch(), loss_fn, loss_tokens)
    engine.save(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_close(weights_of(engine), dict(model.named_parameters()), atol=0.0)
    assert_close(weights_of(engine), weights_of(open_engine(tmp_path, "archon:d1")), atol=0.0)
    other = open_engine(folder)
    other.load(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    assert_close(weights_of(engine), weights_of(other), atol=0.0)


def test_a_checkpoint_of_another_shape_is_refused_by_name(folder, tmp_path):
    wide = write_tiny_model(tmp_path, "qwen3", intermediate_size=64)
    with pytest.raises(ValueError, match=r"gate_proj.weight is \[64, 32\], expected \[48, 32\]"):
        open_engine(folder).load(SaveLoadMeta(path=str(wide), weight_format="hf"))
    deep = write_tiny_model(tmp_path / "deep", "qwen3", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"missing model.layers.1.input_layernorm.weight"):
        open_engine(folder).load(SaveLoadMeta(path=str(deep), weight_format="hf"))


def test_a_critic_equals_archons_and_saves_a_classifier(folder, tmp_path):
    def value_loss(values, mb):
        return ((values - 1.0) ** 2 * mb["loss_mask"]).sum() / mb["loss_mask"].sum()

    critics = [
        open_engine(folder, backend, is_critic=True, optimizer=PLAIN_SGD)
        for backend in ("fsdp:d1", "archon:d1")
    ]
    batch = make_batch()
    first, second = (critic.forward_batch(batch) for critic in critics)
    torch.testing.assert_close(first, second)
    for critic in critics:
        critic.train_batch(batch, value_loss, loss_tokens)
    assert_close(weights_of(critics[0]), weights_of(critics[1]), atol=1e-6)
    critics[0].save(SaveLoadMeta(path=str(tmp_path), weight_format="hf"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model.score.weight, weights_of(critics[0])["score.weight"])
    again = open_engine(tmp_path, is_critic=True)
    assert_close(weights_of(again), weights_of(critics[0]), atol=0.0)


def test_a_random_start_depends_on_the_seed_alone(folder):
    config = TrainEngineConfig(path=str(folder), backend="fsdp:d1", init_from_scratch=True)
    engines = [train_engine_class("fsdp:d1")(config, seed=seed) for seed in (1, 1, 2)]
    before = torch.random.get_rng_state()
    for engine in engines:
        engine.initialize()
    assert torch.equal(before, torch.random.get_rng_state())
    first, same, other = (weights_of(engine) for engine in engines)
    assert_close(first, same, atol=0.0)
    assert not torch.equal(*(w["model.embed_tokens.weight"] for w in (first, other)))


class Receiver:
    """The part of an inference engine that receives weights; it remembers them."""

    def update_weights(self, meta, named_tensors) -> None:
        self.version = meta.version
        self.weights = {name: tensor.clone() for name, tensor in named_tensors}


def test_weights_reach_the_connected_engine(folder):
    engine, receiver = open_engine(folder), Receiver()
    with pytest.raises(RuntimeError, match="connect_engine"):
        engine.update_weights(1)
    engine.connect_engine(receiver, WeightUpdateMeta(type="direct"))
    engine.update_weights(7)
    assert receiver.version == 7
    assert_close(receiver.weights, weights_of(engine), atol=0.0)


def test_misuse_is_named(folder):
    idle = train_engine_class("fsdp:d1")(TrainEngineConfig(path=str(folder), backend="fsdp:d1"))
    with pytest.raises(RuntimeError, match="initialize"):
        idle.forward_batch(make_batch())
    idle.initialize()
    with pytest.raises(RuntimeError, match="optimizer section"):
        idle.train_batch(make_batch(), loss_fn, loss_tokens)
    with pytest.raises(FileNotFoundError, match=r"config\.json not found"):
        open_engine(folder / "nowhere")


@pytest.mark.parametrize("mode", ["shm", "direct"])
def test_a_grpo_run_trains_and_is_served_by_the_native_engine(mode: str, tmp_path):
    config = grpo_config(
        tmp_path,
        "actor.backend=fsdp:d1",
        f"actor.weight_update_mode={mode}",
        "total_train_steps=3",
        "recover.mode=off",
    )
    run_experiment(config)
    paths = RunPaths.of(config)
    assert query(paths.root, "SELECT state, count(*) FROM tasks GROUP BY state") == [
        ("trained", 24)
    ]
    AutoModelForCausalLM.from_pretrained(paths.model)
