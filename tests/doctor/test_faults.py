"""`areal doctor` on live trainings: each planted fault is named, and healthy ones are not accused.

Faults are planted where they would occur: in the config, the files of a model, the weights or code
of a running engine, a workflow, a loss, a subclass of the trainer.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_world import build_chat_tokenizer
from sick_parts import ForgetfulTrainer, LukewarmEngine, shuffle_experts, swap_tensors
from tiny import write_tiny_model
from tiny_run import grpo_config

from areal.dataset.arithmetic import build_char_tokenizer
from areal.doctor.live import examine
from areal.doctor.report import Chart
from areal.doctor.text import check_text
from areal.engine.native.local_engine import NativeLocalEngine
from areal.trainer.experiment import load_datasets
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils.tokenizer import load_hf_tokenizer

SMALL = (
    "actor.weight_update_mode=direct",
    "rollout.max_head_offpolicyness=0",
    "train_dataset.batch_size=4",
    "train_dataset.dataset_kwargs={num_rows: 16}",
    "valid_dataset=null",
    "recover.mode=off",
    "reward_fn=sample_rewards.by_answer",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder for runs, with the models they start from."""
    folder = tmp_path_factory.mktemp("doctor")
    moe, chat = folder / "moe", folder / "chat"
    vocabulary = {"vocab_size": len(build_char_tokenizer(moe)), "eos_token_id": 1}
    write_tiny_model(moe, "qwen3_moe", **vocabulary)
    write_tiny_model(chat, vocab_size=len(build_chat_tokenizer(chat)), eos_token_id=1)
    return folder


@contextmanager
def opened(root: Path, *overrides: str, trainer=PPOTrainer):
    """A training that is about to start, in a folder of its own."""
    number = len(list(root.glob("arithmetic/*")))
    config = grpo_config(root, *SMALL, f"trial_name=t{number}", *overrides)
    with trainer(config, load_datasets(config)[0]) as training:
        yield training


def doctor(root: Path, *overrides: str, **options) -> Chart:
    with opened(root, *overrides, **options) as training:
        return examine(training)


def serve_by(training: PPOTrainer, engine: NativeLocalEngine) -> None:
    """In place of the engine that the training started."""
    training.inference.destroy()
    training.inference = engine
    engine.initialize()
    training.engine.connect_engine(engine, training.weights)


def accuses(chart: Chart, stage: str, *words: str) -> None:
    """The verdict names the stage, and its text has the words."""
    assert chart.exit_code == 1 and chart.first_fault.stage == stage, chart.table()
    for word in (*words, "To do: "):
        assert word in chart.verdict(), chart.verdict()


HEALTHY = {
    "dense": (),
    "experts": ("actor.path={root}/moe", "rollout.return_routed_experts=true"),
    "adapters": ("actor.use_lora=true", "actor.lora_rank=4"),
    "adapters of experts": (
        "actor.path={root}/moe",
        "actor.use_lora=true",
        "actor.lora_rank=4",
        "actor.target_modules=[gate_proj,down_proj]",
    ),
    "FP8": ("native.dtype=fp8", "actor.archon.fp8_forward=true"),
    "FP8 on the server alone": ("native.dtype=fp8",),
    "several turns": ("workflow=multi_turn", "reward_fn=gsm8k", "gconfig.max_new_tokens=4"),
    "agent": (
        "workflow=sample_agents.DigitShare",
        "actor.path={root}/chat",
        "rollout.agent.export_style=concat",
    ),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_training_is_accused_of_nothing(root, kind):
    chart = doctor(root, *(one.format(root=root) for one in HEALTHY[kind]))
    assert chart.exit_code == 0, chart.table()
    seen = {one.stage for one in chart.findings if one.state == "ok"}
    assert {"tokenizer", "tokens", "weights", "logits", "sampling"} < seen, chart.table()
    assert {"advantages", "loss_mask", "optimizer"} < seen, chart.table()
    assert ("routing" in seen) == ("{root}/moe" in str(HEALTHY[kind]))
    assert ("parser" in seen) == (kind == "agent")


# By config alone: overrides, the stage, words of the verdict.
BY_CONFIG = {
    "constant reward": (
        ["reward_fn=sample_rewards.always_one"],
        "reward",
        ["reads neither the text nor the tokens of a reply"],
    ),
    "reward that is not a number": (
        ["reward_fn=sample_rewards.not_a_number"],
        "reward",
        ["must be finite"],
    ),
    "wrong temperature": (["workflow=sick_parts.HotWorkflow"], "sampling", ["temperature 0.5"]),
    "loss mask one token early": (
        ["workflow=sick_parts.EarlyMask"],
        "loss_mask",
        ["one token too early"],
    ),
    "top_p of the workflow": (
        ["workflow=sick_parts.NarrowWorkflow"],
        "sampling",
        ["top_p 0.5", "gconfig.top_p is 1"],
    ),
    "one seed for a group": (["workflow=sick_parts.OneSeed"], "sampling", ["share a seed"]),
    "shifted log-probabilities": (
        ["workflow=sick_parts.LateLogprobs"],
        "tokens",
        ["log-probabilities that no reply had"],
    ),
    "versions of other weights": (
        ["workflow=sick_parts.NextVersion"],
        "tokens",
        ["weight versions that no reply had"],
    ),
    "reward of another sample": (
        ["workflow=sick_parts.OtherSample"],
        "reward",
        ["rewards of other samples"],
    ),
    "cut tokens": (["workflow=sick_parts.CutPrompt"], "tokens", ["no request"]),
    "reward of another row": (
        ["workflow=sick_parts.LateGrader"],
        "reward",
        ["reward of another row"],
    ),
    "reward that raises": (
        ["reward_fn=sample_rewards.divides_by_zero"],
        "reward",
        ["ZeroDivisionError"],
    ),
    "shuffled record of experts": (
        [
            "workflow=sick_parts.OtherExperts",
            "actor.path={root}/moe",
            "rollout.return_routed_experts=true",
        ],
        "routing",
        ["on record"],
    ),
    "advantages of wrong sign": (
        ["actor.reward_scaling=-1"],
        "advantages",
        ["wrong sign", "actor.reward_scaling"],
    ),
    "advantages without baseline": (
        ["actor.reward_norm=null"],
        "advantages",
        ["no baseline", "actor.reward_norm"],
    ),
    "no gradient": (
        ["actor.policy_loss=sick_parts.detached", "actor.eps_clip_higher=null"],
        "optimizer",
        ["gradient is 0"],
    ),
    "loss of wrong sign": (
        ["actor.policy_loss=sick_parts.wrong_sign", "actor.eps_clip_higher=null"],
        "optimizer",
        ["less likely"],
    ),
    "no learning rate": (["actor.optimizer.lr=1e-30"], "optimizer", ["no tensor changed"]),
    "tokenizer of another model": (
        ["tokenizer_path={root}/chat"],
        "tokenizer",
        ["tokenizer_path"],
    ),
}


@pytest.mark.parametrize("fault", BY_CONFIG)
def test_a_fault_of_the_config_is_named(root, fault):
    overrides, stage, words = BY_CONFIG[fault]
    accuses(doctor(root, *(one.format(root=root) for one in overrides)), stage, *words)


def test_swapped_tensors_of_a_live_engine_are_named(root):
    with opened(root) as training:
        training.inference._loop.call(lambda engine: swap_tensors(engine.model)).result()
        chart = examine(training)
    accuses(chart, "weights", "before training", "model.layers.0.self_attn.q_proj.weight")


def test_weights_that_never_arrive_are_named(root):
    accuses(doctor(root, trainer=ForgetfulTrainer), "weights", "after an update")


def test_a_server_with_another_rope_base_is_named(root, tmp_path):
    with opened(root) as training:
        other = Path(shutil.copytree(training.config.actor.path, tmp_path / "model"))
        hf_config = json.loads((other / "config.json").read_text()) | {"rope_theta": 100.0}
        (other / "config.json").write_text(json.dumps(hf_config))
        serve_by(training, NativeLocalEngine(other))
        chart = examine(training)
    accuses(chart, "logits", "layers.0 is the first layer", "rope.theta is 100.0 there")


def test_a_router_that_chooses_other_experts_is_named(root):
    with opened(root, f"actor.path={root}/moe") as training:
        training.inference._loop.call(lambda engine: shuffle_experts(engine.model)).result()
        chart = examine(training)
    accuses(chart, "routing", "layers.0", "experts they choose")


def test_a_server_that_ignores_the_temperature_is_named(root):
    with opened(root, "gconfig.temperature=0.5", "actor.temperature=0.5") as training:
        serve_by(training, LukewarmEngine(training.config.actor.path))
        chart = examine(training)
    accuses(chart, "sampling", "though all layers agree")


def test_a_template_without_generation_prompt_is_named(root, tmp_path):
    model = Path(shutil.copytree(root / "chat", tmp_path / "model"))
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.partition("{%- if add_gen")[0])
    chart = doctor(root, f"actor.path={model}")
    accuses(chart, "template", "<|im_start|>assistant", "add_generation_prompt")


def test_a_tokenizer_with_more_tokens_than_the_model_is_named(root, tmp_path):
    tokenizer = build_char_tokenizer(tmp_path)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path)
    config = grpo_config(root, *SMALL, f"tokenizer_path={tmp_path}")
    chart = Chart()
    check_text(chart, config, load_hf_tokenizer(config.tokenizer_path), [])
    accuses(chart, "tokenizer", f"has {len(tokenizer)} tokens", "tokenizer_path")


def test_frozen_weights_are_named(root):
    with opened(root) as training:
        engine = training.engine
        for weight in engine.model.layers["1"].parameters():
            weight.requires_grad_(False)
        engine._optimizer = engine._build_optimizer(engine.config.optimizer, total_steps=6)
        chart = examine(training)
    accuses(chart, "optimizer", "model.layers.1.", "frozen")


def test_a_parser_of_another_format_is_named(root):
    options = [one.format(root=root) for one in HEALTHY["agent"]]
    config = grpo_config(root, *SMALL, *options, "rollout.agent.tool_call_parser=mistral")
    chart = Chart()
    check_text(chart, config, load_hf_tokenizer(config.tokenizer_path), [])
    accuses(chart, "parser", "rollout.agent.tool_call_parser to hermes")
