"""`areal export`: what agents did, as OpenEnv's traces, chats for SFT and preference pairs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from agent_world import ADD_CALL, Does, ScriptedEngine, open_agent_world
from random_client import RandomClient, open_talkative_world
from sample_agents import QUESTION, ask

from areal.agents.episode_log import FOLDER, read_episodes
from areal.api.cli_args import DatasetConfig
from areal.api.workflow_context import episode
from areal.cli.main import main
from areal.dataset import get_custom_dataset

AGENTS = Path(__file__).resolve().parents[2] / ".venv-agents"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
VALIDATE = """
import sys
from openenv.core.harness.training import TrainingTrace
lines = open(sys.argv[1], encoding="utf-8")
print([len(TrainingTrace.model_validate_json(line).turns) for line in lines])
"""
THOUGHT = "<think>\nI add.\n</think>\n\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with open_agent_world(tmp_path_factory.mktemp("model")) as opened:
        yield opened


async def uses_a_tool(client, extra):
    """A question, a call, its result, an answer; and the question once more. Worth its length."""
    first = (await ask(client, QUESTION, tools=[ADD])).choices[0].message
    answer = first
    if first.tool_calls:
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "4"}
        chat = [*QUESTION, first.model_dump(exclude_none=True), result]
        answer = (await ask(client, chat, tools=[ADD])).choices[0].message
        await ask(client, [*chat, {"role": "user", "content": "Sure?"}], tools=[ADD])
    return float(len(answer.content))


@pytest.fixture
def run_folder(world, tmp_path):
    """Two prompts of two episodes each, and one that was run again."""
    (tmp_path / "config.yaml").touch()
    said = {
        (0, 0): [THOUGHT + ADD_CALL, "It is four.", "Yes."],
        (0, 1): ["5"],
        (1, 0): ["lost", "to a retry"],
        (1, 1): ["equal"],
    }
    with world.open(Does(uses_a_tool), logs=tmp_path / "logs", export_style="concat") as workflow:
        for (task_id, sample), texts in [*said.items(), ((1, 0), ["EQUAL"])]:
            run_episode(world, workflow, task_id, sample, ScriptedEngine(world.tokenizer, *texts))
    return tmp_path


def run_episode(world, workflow, task_id, sample, engine, data=None, *, is_eval=False):
    async def one():
        with episode(task_id=task_id, sample=sample, is_eval=is_eval, run_seed=7):
            return await workflow.arun_episode(engine, data or {})

    return world.runner.run(one()).result(300)


def export(folder, *options):
    out = folder / "out.jsonl"
    assert main(["export", str(folder), "--out", str(out), *options]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def rows_of(kind, folder, world):
    config = DatasetConfig(
        path=str(folder / "out.jsonl"), type=kind, dataset_kwargs={"loader": "chats"}
    )
    return get_custom_dataset("train", config, world.tokenizer)


def test_chats(run_folder, world):
    rows = export(run_folder, "--format", "sft")
    assert [(row["task_id"], row["sample"], row["reward"]) for row in rows] == [
        (0, 0, 11.0),
        (0, 0, 11.0),
        (0, 1, 1.0),
        (1, 0, 5.0),
        (1, 1, 5.0),
    ]
    # Two dialogues begin with the same reply, which is learned in one of them.
    newer, older = ([(m["role"], m.get("weight")) for m in row["messages"]] for row in rows[:2])
    begin = [("user", None), ("assistant", 1), ("tool", None)]
    assert newer == [*begin, ("user", None), ("assistant", 1)]
    assert older == [begin[0], ("assistant", 0), begin[2], ("assistant", 1)]
    assert rows[0]["tools"] == [ADD]


def test_chats_load_as_they_were_sampled(run_folder, world):
    export(run_folder, "--format", "sft", "--min-reward", "2")
    rows = rows_of("sft", run_folder, world)
    learned = [
        world.tokenizer.decode([t for t, m in zip(*row.values(), strict=True) if m]) for row in rows
    ]
    texts = [ADD_CALL, "Yes.", "It is four.", "EQUAL", "equal"]
    assert [text.removesuffix("<|im_end|>") for text in learned] == texts
    for row in rows:
        begin = row["loss_mask"].index(1)
        assert world.tokenizer.decode(row["input_ids"][:begin]).endswith("assistant\n")


def test_pairs(run_folder, world):
    (pair,) = export(run_folder, "--format", "pairs")
    assert pair["prompt"] == QUESTION
    assert pair["chosen"][0]["tool_calls"] and pair["rejected"][0]["content"] == "5"
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (11.0, 1.0)
    for kind in ("rw", "dpo"):
        (row,) = rows_of(kind, run_folder, world)
        chosen, rejected = row["chosen_ids"], row["rejected_ids"]
        assert chosen[: row["prompt_len"]] == rejected[: row["prompt_len"]]
        assert world.tokenizer.decode(rejected[row["prompt_len"] :]) == "5<|im_end|>"
        assert ADD_CALL in world.tokenizer.decode(chosen[row["prompt_len"] :])


@pytest.mark.parametrize("kind", ["sft", "pairs"])
def test_the_datasets_package_loads_them(run_folder, kind):
    datasets = pytest.importorskip("datasets")
    lines = export(run_folder, "--format", kind)
    table = datasets.Dataset.from_json(
        str(run_folder / "out.jsonl"), cache_dir=str(run_folder / "cache")
    )
    assert len(table) == len(lines) and set(table.column_names) == set(lines[0])


# Traces.


def test_a_trace_has_every_sampled_token_once(tmp_path):
    """Of episodes as random as those of test_exact_tokens.py."""
    (tmp_path / "config.yaml").touch()
    folder = tmp_path / "model"
    with (
        open_talkative_world(folder) as world,
        world.open(RandomClient(), logs=tmp_path / "logs", export_style="concat") as workflow,
    ):
        results = [
            run_episode(world, workflow, seed, 0, world.engine, {"seed": seed})
            for seed in range(10)
        ]
    for line, items in zip(export(tmp_path), results, strict=True):
        turns = {id(turn): turn for leaf in items.values() for turn in leaf.path()}.values()
        sampled = sorted(
            (turn.model_response.input_tokens, turn.model_response.output_tokens) for turn in turns
        )
        traced = [(t["prompt_token_ids"], t["completion_token_ids"]) for t in line["turns"]]
        assert line["schema_version"] == 1 and sorted(traced) == sampled
        chats = {turn.created: turn.whole_chat() for turn in turns}
        for traced_turn, created in zip(line["turns"], sorted(chats), strict=True):
            message = traced_turn["response"]["choices"][0]["message"]
            assert message == chats[created][-1]
            assert len(traced_turn["request"]["messages"]) == len(chats[created]) - 1


@pytest.mark.real_agents
def test_openenv_takes_the_traces(run_folder):
    """Its package has an environment of its own: its pins and ours need not agree."""
    lines = export(run_folder)
    told = subprocess.run(
        [AGENTS / "bin" / "python", "-c", VALIDATE, run_folder / "out.jsonl"],
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(AGENTS / "openenv")},
    )
    assert json.loads(told.stdout) == [len(line["turns"]) for line in lines] == [3, 1, 1, 1]


def test_a_trace_keeps_to_the_schema(run_folder):
    """What OpenEnv 0.10 checks, also where it is not installed."""
    for line in export(run_folder):
        assert line.keys() == {"schema_version", "turns"}
        names = [turn["node_id"] for turn in line["turns"]]
        assert len(set(names)) == len(names) and all(names)
        for turn in line["turns"]:
            assert turn.keys() == {
                *("node_id", "prompt_token_ids", "completion_token_ids", "per_token_logps"),
                *("loss_mask", "request", "response", "metadata"),
            }
            prompt, sampled = turn["prompt_token_ids"], turn["completion_token_ids"]
            assert turn["loss_mask"] == [0] * len(prompt) + [1] * len(sampled)
            assert prompt and len(turn["per_token_logps"]) == len(sampled)
            assert all(logprob <= 0 for logprob in turn["per_token_logps"])


# What is kept, and what is wrong.


def test_evaluations_are_not_kept_and_half_a_line_is_skipped(world, tmp_path):
    with world.open(Does(uses_a_tool), logs=tmp_path) as workflow:
        for is_eval, text in ((False, "kept"), (True, "not kept")):
            engine = ScriptedEngine(world.tokenizer, text)
            run_episode(world, workflow, 0, 0, engine, is_eval=is_eval)
    (file,) = (tmp_path / FOLDER).iterdir()
    assert file.stat().st_mode & 0o077 == 0
    with file.open("a") as lines:
        lines.write('{"task_id": 1, "sam')
    (one,) = read_episodes(tmp_path)
    assert one.turns[0].reply["content"] == "kept"


@pytest.mark.parametrize(
    "options, message",
    [
        (("--min-reward", "99"), "no episode is left of 4 episodes with rewards from 1 to 11"),
        (("--format", "pairs", "--max-reward", "1"), "needs two episodes of one prompt"),
    ],
)
def test_nothing_to_write_is_told(run_folder, capsys, options, message):
    out = run_folder / "out.jsonl"
    assert main(["export", str(run_folder), "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_a_run_without_episodes_is_told_which_key_keeps_them(tmp_path, capsys):
    assert main(["export", str(tmp_path / "none"), "--out", str(tmp_path / "x")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "set rollout.dump_to_file=true" in capsys.readouterr().err


def test_a_damaged_file_is_named(run_folder, capsys):
    (file,) = (run_folder / "logs" / FOLDER).iterdir()
    file.write_text("{\n" + file.read_text())
    assert main(["export", str(run_folder), "--out", str(run_folder / "x")]) == 2
    assert f"{file}, line 1: not JSON" in capsys.readouterr().err
