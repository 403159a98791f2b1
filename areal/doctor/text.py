"""Tokenizer, chat template and tool parser: what a model reads and how its replies are read.

In: the config, its tokenizer, and a few chats. No model is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.workflow_api import is_agent
from areal.doctor.report import Chart
from areal.openai.parsing.formats import format_of_template
from areal.openai.parsing.parser import parse_output
from areal.utils.chat_template import TemplateError, render_chat
from areal.utils.hub import model_folder
from areal.utils.model_files import language_config, read_hf_config
from areal.utils.tokenizer import load_hf_tokenizer
from areal.workflow.resolve import find_workflow

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig

_QUESTION, _ANSWER = "What is 2 + 2?", "@answer@"
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
_ARGUMENTS = {"a": 2, "b": 3}


def check_text(chart: Chart, config: PPOConfig, tokenizer: Any, chats: Sequence[Any]) -> None:
    """`chats` are those of the first rows; may be empty."""
    variables = {"enable_thinking": bool(config.workflow_kwargs.get("enable_thinking", False))}
    _check_template(chart, tokenizer, variables)
    texts = [_rendered(tokenizer, chat, variables) for chat in chats]
    _check_tokenizer(chart, config, tokenizer, [_QUESTION, *filter(None, texts)])
    _check_parser(chart, config, tokenizer, variables)


def _rendered(tokenizer: Any, chat: Any, variables: dict[str, Any], **options: Any) -> str | None:
    """None if the template rejects the chat."""
    try:
        return render_chat(tokenizer, chat, variables=variables, **options)
    except TemplateError:
        return None


def _check_tokenizer(chart: Chart, config: PPOConfig, tokenizer: Any, texts: Sequence[str]) -> None:
    folder = model_folder(config.actor.path, weights=False)
    vocab_size = language_config(read_hf_config(folder)).get("vocab_size")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    largest = max([tokenizer.eos_token_id, *(max(row, default=0) for row in ids)])
    change = f"set tokenizer_path to the tokenizer of actor.path ({config.actor.path})"
    if vocab_size is not None and largest >= vocab_size:
        found = f"token {largest} is beyond the model's vocabulary of {vocab_size}"
        return chart.fault("tokenizer", found, change=change)
    own = _tokenizer_of(folder)
    for text, row in zip(texts, ids, strict=True):
        expected = row if own is None else own(text, add_special_tokens=False)["input_ids"]
        if row != expected:
            found = (
                f"tokenizer_path {config.tokenizer_path} has other tokens for {text!r:.60} than "
                f"the model's own tokenizer: {row[:8]}, expected {expected[:8]}"
            )
            return chart.fault("tokenizer", found, change=change)
    if own is not None and len(own) <= (vocab_size or 0) < len(tokenizer):
        found = (
            f"tokenizer_path {config.tokenizer_path} has {len(tokenizer)} tokens, {len(own)} are "
            f"the model's own and {vocab_size} its vocabulary"
        )
        return chart.fault("tokenizer", found, change=change)
    beside = "no tokenizer is beside the model to compare with" if own is None else "as the model's"
    chart.ok("tokenizer", f"{len(texts)} texts have tokens within the vocabulary; {beside}")


def _tokenizer_of(folder: Path) -> Any:
    """That of the model's folder; None if it has none that can be used."""
    try:
        return load_hf_tokenizer(str(folder))
    except (ValueError, FileNotFoundError):
        return None


def _check_template(chart: Chart, tokenizer: Any, variables: dict[str, Any]) -> None:
    """A prompt must end where the model's reply begins: after the header of its turn."""
    question = {"role": "user", "content": _QUESTION}
    prompt = _rendered(tokenizer, [question], variables)
    whole = _rendered(tokenizer, [question, {"role": "assistant", "content": _ANSWER}], variables)
    if prompt is None or whole is None or _ANSWER not in whole:
        return chart.unseen("template", "it does not render a question and an answer")
    header = whole[: whole.index(_ANSWER)]
    # Some templates open reasoning in the prompt, or write it into earlier turns only.
    missing = header[len(prompt) :] if header.startswith(prompt) else ""
    for mark in ("<think>", "</think>"):
        missing = missing.replace(mark, "")
    if missing.strip():
        return chart.fault(
            "template",
            f"prompts end before the header of the reply ({missing!r}): the template has no "
            "generation prompt, so the model continues the user's turn",
            change="add it to the chat template: {% if add_generation_prompt %}"
            f"{missing}{{% endif %}}",
        )
    if _QUESTION not in prompt:
        return chart.fault(
            "template",
            f"the prompt of {_QUESTION!r} is {prompt!r:.80}: the question is not in it",
            change="use the chat template of the model's instruct version",
        )
    chart.ok("template", f"a prompt ends where the reply begins: {prompt[-24:]!r}")


def _check_parser(
    chart: Chart, config: PPOConfig, tokenizer: Any, variables: dict[str, Any]
) -> None:
    """A tool call that the template writes must be read back."""
    if config.rollout.agent.mode != "online" and not is_agent(find_workflow(config.workflow)):
        return chart.unseen("parser", "not used: the workflow has no tools")
    named = config.rollout.agent.tool_call_parser
    expected = format_of_template(tokenizer.get_chat_template(None, [_TOOL]))
    tool_format = expected if named == "auto" else named
    text = _written_call(tokenizer, variables)
    if text is None:
        return chart.unseen("parser", "the chat template writes no tool calls")
    read = parse_output(text, tool_format, tools=[_TOOL]).calls
    if [(call.name, json.loads(call.arguments)) for call in read] != [("add", _ARGUMENTS)]:
        return chart.fault(
            "parser",
            f"the tool call {text!r:.90}, as the chat template writes it, is not read by the "
            f"format {tool_format!r}",
            change=f"set rollout.agent.tool_call_parser to {expected} or auto",
        )
    chart.ok("parser", f"a tool call is read back from the template's text as {tool_format}")


def _written_call(tokenizer: Any, variables: dict[str, Any]) -> str | None:
    """The reply with one tool call as the template writes it, without the marks of the turn."""
    function = {"name": "add", "arguments": _ARGUMENTS}
    call = {"id": "call_0", "type": "function", "function": function}
    question = {"role": "user", "content": _QUESTION}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = _rendered(tokenizer, [question], variables, tools=[_TOOL])
    whole = _rendered(tokenizer, [question, reply], variables, tools=[_TOOL])
    if prompt is None or whole is None or not whole.startswith(prompt):
        return None
    text = whole[len(prompt) :].partition(tokenizer.eos_token)[0]
    return text if "add" in text else None
