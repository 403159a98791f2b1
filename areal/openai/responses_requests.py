"""OpenAI's responses API as a request: its body, translated to that of a chat completion.

`previous_response_id` may name an earlier response of the same session. Tools other than functions
are left out. Calls of other kinds in the history (custom tools, the local shell) are shown to the
model as calls of functions; reasoning goes to the message it precedes, if it can be read. Replies
are in responses_replies.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from areal.api.json_text import dumps
from areal.openai.content_parts import InputImage, chat_content, sent_again
from areal.openai.errors import WireError, parse_body
from areal.openai.requests import Arguments, Count, HostedTool, Sampling, by_tool_kind, left_out
from areal.utils.http_body import Body, Integer, Items, Name, Text, refused

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache

_SAME = {*Sampling.model_fields, "parallel_tool_calls", "top_logprobs", "chat_template_kwargs"}
_LOGPROBS = "message.output_text.logprobs"


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: Text = ""


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text = ""

    @property
    def text(self) -> str:
        return self.refusal


Words = Text | Items[Annotated[TextPart | RefusalPart | InputImage, Field(discriminator="type")]]


class Message(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Words


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: Any = None
    name: Text
    arguments: Arguments


class CustomCall(Body):
    """A call of a tool that takes free text."""

    type: Literal["custom_tool_call"]
    call_id: Any = None
    name: Text
    input: Text

    @property
    def arguments(self) -> str:
        return dumps({"input": self.input})


class ShellCall(Body):
    type: Literal["local_shell_call"]
    call_id: Any = None
    action: dict[str, Any]

    @property
    def name(self) -> str:
        return "local_shell"

    @property
    def arguments(self) -> str:
        return dumps(self.action)


OutputKind = Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]


class CallOutput(Body):
    type: OutputKind
    call_id: Any = None
    output: Words


class ReasoningText(Body):
    text: Text = ""


class Reasoning(Body):
    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None  # None: encrypted, by another provider


def _kind_of(item: Any) -> Any:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return "output" if isinstance(kind, str) and kind in get_args(OutputKind) else kind


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[ShellCall, Tag("local_shell_call")]
    | Annotated[CallOutput, Tag("output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind_of),
]


class Tool(Body):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None


AnyTool = Annotated[
    Annotated[Tool, Tag("own")] | Annotated[HostedTool, Tag("hosted")], by_tool_kind("function")
]


class NamedTool(Body):
    type: Literal["function"]
    name: Name


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[AnyTool]


ToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
)


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    # A model has an attribute `schema` already.
    json_schema_: dict[str, Any] = Field(alias="schema")


class TextOptions(Body):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesBody(Sampling):
    max_output_tokens: Count = None
    instructions: Text | None = None
    input: Text | Items[Item]
    previous_response_id: Text | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Integer(0, 20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextOptions | None = None
    include: Any = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @model_validator(mode="after")
    def _is_servable(self) -> ResponsesBody:
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                raise refused(name, "not supported, leave it out")
        if isinstance(self.include, list) and _LOGPROBS in self.include:
            raise refused("include", f"{_LOGPROBS!r}: ask /v1/chat/completions for them")
        return self


def chat_body(content: dict[str, Any], cache: InteractionCache | None) -> dict[str, Any]:
    body = parse_body(ResponsesBody, content)
    chat = body.model_dump(include=_SAME, exclude_none=True)
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs:
        chat["logprobs"] = True
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    if body.tools is not None:
        left_out([tool for tool in body.tools if isinstance(tool, HostedTool)])
        chat["tools"] = [_chat_tool(tool) for tool in body.tools if isinstance(tool, Tool)]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    chat["messages"] = [*_earlier(body.previous_response_id, cache), *_messages(body.input)]
    if body.instructions:
        chat["messages"].insert(0, {"role": "system", "content": body.instructions})
    return chat


def _chat_tool(tool: Tool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _tool_choice(choice: str | NamedTool | AllowedTools) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    tools = [_chat_tool(tool) for tool in choice.tools if isinstance(tool, Tool)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _format(wanted: PlainFormat | SchemaFormat) -> dict[str, Any]:
    if isinstance(wanted, PlainFormat):
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"schema": wanted.json_schema_}}


def _earlier(name: str | None, cache: InteractionCache | None) -> list[dict[str, Any]]:
    """The chat up to and including this response; instructions are not carried over."""
    if name is None:
        return []
    if cache is None:
        reason = (
            "this server keeps no responses; leave it out and send the earlier items in `input`"
        )
        raise WireError(400, f"previous_response_id: {reason}", "previous_response_id")
    if name not in cache:
        raise WireError(
            400, f"previous_response_id: no {name!r:.60} in this session", "previous_response_id"
        )
    chat = [sent_again(message) for message in cache[name].whole_chat()]
    has_instructions = bool((cache[name].response or {}).get("instructions"))
    return chat[1:] if has_instructions else chat


def _messages(given: str | list[Item]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # for the assistant's next message
    for item in given:
        match item:
            case Reasoning():
                thoughts += [part.text for part in item.content or ()]
            case Message(role="assistant") if messages and messages[-1].get("tool_calls"):
                messages[-1]["content"] += _said(item.content)  # the turn has not ended
            case Message(role="assistant"):
                messages.append(_assistant(thoughts) | {"content": _said(item.content)})
            case Message():
                content = chat_content(_parts(item.content), "\n")
                messages.append({"role": item.role, "content": content})
            case FunctionCall() | CustomCall() | ShellCall():
                # One assistant message is several items: texts and tool calls.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append(_assistant(thoughts))
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case CallOutput():
                result = {"role": "tool", "tool_call_id": item.call_id}
                messages.append({**result, "content": chat_content(_parts(item.output), "\n")})
    return messages


def _assistant(thoughts: list[str]) -> dict[str, Any]:
    """A message with the reasoning before it, which is used up."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if reasoning := "".join(thoughts):
        message["reasoning_content"] = reasoning
    thoughts.clear()
    return message


def _parts(content: Words) -> list[Any]:
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


def _said(content: Words) -> str:
    """The text of an assistant's message."""
    parts = _parts(content)
    if any(isinstance(part, InputImage) for part in parts):
        raise WireError(400, "input: a message of the assistant has no images", "input")
    return "".join(part.text for part in parts)
