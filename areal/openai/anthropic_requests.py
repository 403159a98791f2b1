"""Anthropic's messages API as a request: its body, translated to that of a chat completion.

System text may stand among the messages, tools may be of kinds that only Anthropic runs (left out)
or deferred (shown where a tool result refers to them). Thinking of earlier turns becomes
`reasoning_content`. Options without a counterpart (`cache_control`, `metadata`, `thinking`,
`context_management` ...) have no effect. Blocks that are not text, images, thinking or tool use are
rejected. Replies are in anthropic_replies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, Tag

from areal.api.json_text import dumps
from areal.openai.content_parts import Content, ImageBlock, chat_content
from areal.openai.errors import WireError, parse_body
from areal.openai.requests import Count, Temperature, TopK, TopP, by_tool_kind, left_out
from areal.utils.http_body import Body, Items, Name, Text

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache

_SAME = {"model", "max_tokens", "temperature", "top_p", "top_k", "stream"}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
# Claude Code's note to Anthropic's billing: no prompt, and different in every conversation.
_BILLING = "x-anthropic-billing-header:"


class WithText(Body):
    """A block of a place that holds only text."""

    text: Text


class TextBlock(WithText):
    type: Literal["text"]


class ToolReference(Body):
    """A deferred tool that a search has found."""

    type: Literal["tool_reference"]
    tool_name: Text


class SearchResult(Body):
    type: Literal["search_result"]
    content: Items[WithText]

    @property
    def text(self) -> str:
        return _text(self.content)


class TextSource(Body):
    type: Literal["text"]
    data: Text


class Document(Body):
    """Plain text; a PDF is refused."""

    type: Literal["document"]
    source: TextSource

    @property
    def text(self) -> str:
        return self.source.data


class ToolUse(Body):
    type: Literal["tool_use"]
    id: Any = None
    name: Text
    input: Any = None


ResultBlock = Annotated[
    TextBlock | ToolReference | SearchResult | Document | ImageBlock, Field(discriminator="type")
]


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: Any = None
    content: Text | Items[ResultBlock] | None = None
    is_error: bool | None = None


class Thinking(Body):
    type: Literal["thinking"]
    thinking: Text = ""


class RedactedThinking(Body):
    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock
    | ToolUse
    | ToolResult
    | Thinking
    | RedactedThinking
    | SearchResult
    | Document
    | ImageBlock,
    Field(discriminator="type"),
]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | Items[Block]


class Tool(Body):
    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None

    def function(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
        }
        return {name: value for name, value in function.items() if value is not None}


class HostedTool(Body):
    """A tool that Anthropic runs, or whose schema only its models know."""

    type: Annotated[Name, Field(json_schema_extra={"not": {"const": "custom"}})]


AnyTool = Annotated[
    Annotated[Tool, Tag("own")] | Annotated[HostedTool, Tag("hosted")], by_tool_kind("custom")
]


class FreeChoice(Body):
    type: Literal["auto", "none", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    # A model has an attribute `schema` already.
    json_schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: SchemaFormat | None = None


class PromptBody(Body):
    """What makes the prompt: all of a request to count its tokens."""

    model: Text | None = None
    system: Text | Items[WithText] | None = None
    messages: Annotated[Items[Message], Field(min_length=1)]
    tools: Items[AnyTool] | None = None
    tool_choice: Annotated[FreeChoice | NamedChoice, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None  # its name before output_config


class MessagesBody(PromptBody):
    max_tokens: Count = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    stream: bool | None = None
    stop_sequences: Items[Name] | None = None


def chat_body(content: dict[str, Any], cache: InteractionCache | None) -> dict[str, Any]:
    body = parse_body(MessagesBody, content)
    chat = _prompt(body) | body.model_dump(include=_SAME, exclude_none=True)
    if body.stop_sequences is not None:
        chat["stop"] = body.stop_sequences
    return chat


def prompt_body(content: dict[str, Any]) -> dict[str, Any]:
    """The chat whose tokens /v1/messages/count_tokens counts."""
    return _prompt(parse_body(PromptBody, content))


def _prompt(body: PromptBody) -> dict[str, Any]:
    own = [tool for tool in body.tools or () if isinstance(tool, Tool)]
    left_out([tool for tool in body.tools or () if isinstance(tool, HostedTool)])
    chat: dict[str, Any] = {"messages": []}
    if isinstance(body.system, list):
        body.system = [one for one in body.system if not one.text.startswith(_BILLING)]
    if system := _text(body.system):
        chat["messages"].append({"role": "system", "content": system})
    deferred = {tool.name: tool for tool in own if tool.defer_loading}
    for i, message in enumerate(body.messages):
        chat["messages"] += _messages(message, f"messages[{i}]", deferred)
    if own:
        shown = [tool.function() for tool in own if not tool.defer_loading]
        chat["tools"] = [{"type": "function", "function": function} for function in shown]
    if choice := body.tool_choice:
        chat["tool_choice"] = _tool_choice(choice)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    wanted = body.output_config and body.output_config.format or body.output_format
    if wanted is not None:
        schema = {"schema": wanted.json_schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _tool_choice(choice: FreeChoice | NamedChoice) -> str | dict[str, Any]:
    if isinstance(choice, NamedChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return _TOOL_CHOICES[choice.type]


def _messages(message: Message, where: str, deferred: dict[str, Tool]) -> list[dict[str, Any]]:
    """One Anthropic message may become several: each tool result is a chat message of its own."""
    role, blocks = message.role, message.content
    if isinstance(blocks, str):
        return [{"role": role, "content": blocks}]
    results, texts, calls, thoughts = [], [], [], []
    for i, block in enumerate(blocks):
        match block:
            case Thinking() if role == "assistant":
                thoughts.append(block.thinking)
            case RedactedThinking() if role == "assistant":
                continue
            case ToolUse() if role == "assistant":
                calls.append(_call(block))
            case ToolResult() if role == "user":
                results.append(_result(block, deferred))
            case TextBlock() | SearchResult() | Document():
                texts.append(block)
            case ImageBlock() if role == "user":
                texts.append(block)
            case _:
                place = f"{where}.content[{i}].type"
                reason = f"{block.type!r} is not understood in a message of role {role!r}"
                raise WireError(400, f"{place}: {reason}", place)
    if role == "assistant":
        reasoning = "".join(thoughts)
        return [
            {
                "role": role,
                "content": "".join(block.text for block in texts),
                **({"reasoning_content": reasoning} if reasoning else {}),
                **({"tool_calls": calls} if calls else {}),
            }
        ]
    content = chat_content(texts, "\n")
    return [*results, *([{"role": role, "content": content}] if texts else [])]


def _call(block: ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": dumps(block.input or {})}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResult, deferred: dict[str, Tool]) -> dict[str, Any]:
    content: Content | list[Any] = block.content or ""
    if not isinstance(content, str):
        shown = [
            WithText(text=_definition(one.tool_name, deferred))
            if isinstance(one, ToolReference)
            else one
            for one in content
        ]
        content = chat_content(shown, "\n")
    if block.is_error and not content:
        content = "error"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _definition(name: str, deferred: dict[str, Tool]) -> str:
    """A deferred tool where it was found, so that the prompt before it stays as it is."""
    return dumps(deferred[name].function()) if name in deferred else name


def _text(content: str | Sequence[WithText | SearchResult | Document] | None) -> str:
    parts = content or ""
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
