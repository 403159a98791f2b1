"""Rows with images in a path that reads text only are refused before anything starts."""

from __future__ import annotations

import json

import pytest
import torch
from config_files import load
from image_prompts import RULES
from tiny import tiny_config, write_tiny_model
from tiny_vision import write_tiny_vision_model

from areal.api.workflow_api import RolloutWorkflow
from areal.dataset import get_custom_dataset
from areal.dataset.arithmetic import build_char_tokenizer
from areal.evaluation.runner import make_plan
from areal.evaluation.settings import Options, load_settings
from areal.evaluation.targets import find_targets
from areal.trainer.episodes import refuse_images
from areal.trainer.experiment import TRAINERS, refuse_image_rows
from areal.workflow.rlvr import RLVRWorkflow

TEXT = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
IMAGE = {**TEXT, "images": [b"png"]}
PICTURE = {**TEXT, "image": {"bytes": b"png", "path": None}}
PART = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}


class Sees(RolloutWorkflow):
    async def arun_episode(self, engine, data): ...


@pytest.mark.parametrize(
    "rows", [[IMAGE], [TEXT] * 50 + [IMAGE], [TEXT, PART], [PICTURE], (IMAGE, TEXT)]
)
def test_images_are_refused_by_workflows_of_text(tmp_path, rows):
    config = load(tmp_path, "ppo")
    named = ("rlvr", "multi_turn", "tir", "env", "areal.workflow.rlvr.RLVRWorkflow")
    for given in (None, *named, RLVRWorkflow):
        with pytest.raises(ValueError, match="^train_dataset.path: the rows of 'arithmetic' have"):
            refuse_images(config, given, None, rows, is_eval=False)
    with pytest.raises(ValueError, match="^valid_dataset.path: the rows of have images"):
        refuse_images(config, None, None, rows, is_eval=True)
    refuse_images(config, Sees, None, rows, is_eval=False)
    refuse_images(config, None, {"data_extract_prompt_fn": str}, rows, is_eval=False)
    harmless = [TEXT, {"messages": "any"}, {}, {**TEXT, "image": "a name"}]
    refuse_images(config, None, None, harmless, is_eval=False)


def test_images_are_refused_for_agents_of_a_model_of_text(tmp_path):
    text = write_tiny_model(tmp_path / "text")
    sees = write_tiny_vision_model(tmp_path / "sees")
    (sees / "preprocessor_config.json").write_text(json.dumps(RULES))
    agent, online = "workflow=sample_agents.DigitShare", "rollout.agent.mode=online"
    for how in (agent, online):
        config = load(tmp_path, "ppo", how, f"actor.path={text}")
        with pytest.raises(
            ValueError, match="^train_dataset.path: .* agents talk to, .* text only"
        ):
            refuse_images(config, None, None, [TEXT, IMAGE], is_eval=False)
        refuse_images(config, None, None, [TEXT], is_eval=False)
        config = load(tmp_path, "ppo", how, f"actor.path={sees}")
        refuse_images(config, None, None, [TEXT, IMAGE], is_eval=False)


PIXELS = {"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
LEARNED = {"input_ids": [1, 2], "loss_mask": [0, 1]}
PAIR = {"chosen_ids": [1, 2], "rejected_ids": [1, 3], "prompt_len": 1}


@pytest.mark.parametrize(
    ("trainer", "row", "found"),
    [
        ("sft", {**LEARNED, "multi_modal_input": PIXELS}, "the model .* reads text only"),
        ("sft", {**LEARNED, "images": [b"png"]}, "reads them in 'multi_modal_input'"),
        ("rw", {**PAIR, "multi_modal_input": PIXELS}, "trainer rw reads text only"),
        ("dpo", {**PAIR, "images": [b"png"]}, "trainer dpo reads text only"),
    ],
)
def test_images_are_refused_before_a_model_of_rows_is_loaded(tmp_path, trainer, row, found):
    model = tmp_path / "model"  # no weights: nothing has been loaded
    model.mkdir()
    build_char_tokenizer(model)
    (model / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    overrides = (f"actor.path={model}", f"cluster.fileroot={tmp_path}")
    config = load(tmp_path, trainer, *overrides)
    plain = {key: value for key, value in row.items() if key not in ("images", "multi_modal_input")}
    for rows in ([plain, row], (row,)):
        with pytest.raises(ValueError, match=f"^train_dataset: row . has images, and .*{found}"):
            refuse_image_rows(config, rows, None)
        with pytest.raises(ValueError, match=f"^valid_dataset: row . has images, and .*{found}"):
            refuse_image_rows(config, [plain], rows)
    with pytest.raises(ValueError, match=found):
        TRAINERS[trainer](config, [row] * 8)
    refuse_image_rows(config, [plain], [plain])


@pytest.mark.parametrize("workflow", ["rlvr", "sample_agents.DigitShare"])
def test_an_evaluation_refuses_images_before_it_begins(tmp_path, workflow):
    model = write_tiny_model(tmp_path / "model")
    build_char_tokenizer(model)
    (target,) = find_targets([str(model)], checkpoints=False)
    file = tmp_path / "eval.yaml"
    file.write_text(
        "experiment_name: e\ntrial_name: t\n"
        "train_dataset: {path: arithmetic, batch_size: 4}\n"
        "valid_dataset: {path: broken_parts.image_rows}\n"
        f"workflow: {workflow}\n"
        f"actor: {{path: {model}, optimizer: {{lr: 1.0e-3}}}}\n"
    )
    settings = load_settings(target, Options(config=str(file)))
    with pytest.raises(ValueError, match="^valid_dataset.path: the rows of .* have images"):
        make_plan(target, settings)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"type": "image", "image": "sha256:00"}], "images, and the loader chats reads text"),
        (5, "the content of a message is a text or a list of parts, found 5"),
    ],
)
def test_exported_chats_without_text_are_refused(tmp_path, kind, content, says):
    seen = [{"role": "user", "content": content}]
    reply = {"role": "assistant", "content": "1"}
    row = {"messages": [*seen, reply]}
    if kind == "dpo":
        row = {"prompt": seen, "chosen": [reply], "rejected": [reply]}
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(row) + "\n")
    config = load(tmp_path, kind, f"train_dataset.path={file}")
    config.train_dataset.dataset_kwargs = {"loader": "chats"}
    tokenizer = build_char_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"row 0, column .* {says}"):
        get_custom_dataset("train", config.train_dataset, tokenizer)
