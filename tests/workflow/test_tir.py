"""TIRWorkflow: code runs in a real sandbox, and its output is read but not trained on."""

from __future__ import annotations

import pytest
from sandbox_support import needs_sandbox
from scripted_engine import ScriptedEngine
from tiny_tokenizer import byte_tokenizer
from workflow.light_rewards import contains_42

from areal.api.config.inference import GenerationHyperparameters
from areal.sandbox.isolation import SandboxError
from areal.workflow.resolve import find_workflow
from areal.workflow.tir import TIRWorkflow

pytestmark = needs_sandbox

ROW = {"messages": [{"role": "user", "content": "what is 6 * 7?"}]}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def make(tokenizer):
    made = []

    def make(max_tokens=4096, **kwargs):
        gconfig = GenerationHyperparameters(max_new_tokens=256, max_tokens=max_tokens)
        made.append(TIRWorkflow(contains_42, gconfig, tokenizer, **kwargs))
        return made[-1]

    yield make
    for workflow in made:
        workflow.close()


def code(text):
    return f"let me see\n```python\n{text}\n```\n"


async def test_output_is_appended_and_not_trained_on(make, tokenizer):
    first, second = code("open('x', 'w').write('42')"), code("print(open('x').read())")
    engine = ScriptedEngine(tokenizer, [first + "never said", second, "so it is"])
    result = await make().arun_episode(engine, ROW)
    ids, mask = result["input_ids"][0], result["loss_mask"][0].bool()
    empty, output = "```output\n\n```\n", "```output\n42\n```\n"
    assert engine.asked[1] == engine.asked[0] + first + empty
    assert engine.asked[2] == engine.asked[1] + second + output
    assert tokenizer.decode(ids) == engine.asked[2] + "so it is<|eos|>"
    assert tokenizer.decode(ids[mask]) == first + second + "so it is<|eos|>"
    assert result["rewards"].tolist() == [1.0]
    assert set(result["versions"][0][~mask].tolist()) == {-1}


async def test_mistakes_of_the_code_are_shown_and_calls_are_bounded(make, tokenizer):
    replies = [code("1/0"), code("import time; time.sleep(60)"), code("print(6 * 7)")]
    engine = ScriptedEngine(tokenizer, replies)
    result = await make(max_calls=2, sandbox={"wall_s": 5}).arun_episode(engine, ROW)
    assert "ZeroDivisionError: division by zero" in engine.asked[1]
    assert "[ended: more than wall_s allows]" in engine.asked[2]
    assert len(engine.asked) == 3 and result["rewards"].tolist() == [0.0]  # the third did not run


async def test_a_reply_without_code_is_an_answer(make, tokenizer):
    engine = ScriptedEngine(tokenizer, ["it is 42"])
    result = await make().arun_episode(engine, ROW)
    assert len(engine.asked) == 1 and result["rewards"].tolist() == [1.0]
    engine = ScriptedEngine(tokenizer, ["```\n", "42"])  # the end of code without its start
    result = await make().arun_episode(engine, ROW)
    assert engine.asked[1] == engine.asked[0] + "```\n" and result["rewards"].tolist() == [1.0]


async def test_an_output_that_does_not_fit_ends_the_episode(make, tokenizer):
    engine = ScriptedEngine(tokenizer, [code("print('x' * 5000)"), "never said"])
    result = await make(max_tokens=500).arun_episode(engine, ROW)
    assert len(engine.asked) == 1 and result["input_ids"].shape[1] < 500


async def test_without_a_sandbox_the_episode_fails(make, tokenizer, monkeypatch):
    monkeypatch.setattr("sys.base_exec_prefix", "/nowhere")
    with pytest.raises(SandboxError, match="no sandbox can be started"):
        await make().arun_episode(ScriptedEngine(tokenizer, [code("print(42)")]), ROW)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"max_calls": 0}, "workflow_kwargs.max_calls must be at least 1"),
        ({"code_end": ""}, "workflow_kwargs.code_end must be a text"),
        ({"sandbox": {"wall": 3}}, "sandbox.wall: unknown key"),
    ],
)
def test_impossible_options_are_refused(make, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_by_name():
    assert find_workflow("tir") is TIRWorkflow
