"""A model's output, piece by piece, as reasoning, content and tool calls.

    parser = OutputParser("hermes", tools=tools)
    parser.push("<think>hm</thi")      # [Reasoning("hm")]
    parser.push("nk>Well, <tool_")     # [Content("Well,")]
    ...
    parser.finish()                    # the events that were held back

Reasoning comes first: a call inside it is never made, and unclosed reasoning extends to the end. A
template may open it in the prompt, so that the output begins inside (see begins_in_reasoning).

Invariants
- The joined events do not depend on how the text is cut into pushes; `parse_output` is one push.
- A call is reported when it is complete and valid, never in part. Anything else stays content: no
  text of the model is lost but marks and the white space around what is taken out of the content.
- Content and reasoning are reported at once, except what may be a mark, a call, or white space
  before either.
- Linear time, whatever the text: after _PATIENCE characters of broken calls the rest is content.

In harmony (gpt-oss) the output is a sequence of messages with a channel each:

    <|channel|>analysis<|message|>TEXT<|end|>                             reasoning
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>           content, so is commentary
    <|start|>assistant<|channel|>commentary to=functions.f<|message|>{...}<|call|>    a call

A message addressed to a function is a call in any channel; text of the analysis never is.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from areal.api.json_text import loads_written
from areal.openai.parsing.cursor import Cursor, NotACall, Reading
from areal.openai.parsing.formats import THINK, TOOL_FORMATS, Grammar, ToolFormat
from areal.openai.parsing.values import ToolSchemas, WrittenCall, written_call

# Text that turns out to be no call is read twice. This bounds the second reading of one output, in
# characters; each attempt costs some in addition.
_PATIENCE = 1 << 18
_ATTEMPT = 1 << 12
_MAX_HEADER = 512  # of a harmony message
_HEADER_TOKENS = 32  # at the end of a prompt: longer than an opening mark and white space

_ANALYSIS = "<|channel|>analysis<|message|>"
# By the names vLLM and SGLang use; all but "mistral" write <think>.
_REASONING_MARKS = {"qwen3": THINK, "deepseek-r1": THINK, "mistral": {"[THINK]": "[/THINK]"}}
REASONING_PARSERS = ("auto", "none", *_REASONING_MARKS)


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`index` counts the calls of one output; `arguments` is JSON."""

    index: int
    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """In OpenAI's format."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Event: TypeAlias = Reasoning | Content | ToolCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    content: str
    reasoning: str
    calls: list[ToolCall]


class OutputParser:
    """`tools`: calls are read only if there are any. `reasoning`: one of REASONING_PARSERS.

    "auto" takes the format's own marks; "none" leaves reasoning and its marks in the content.
    """

    def __init__(
        self,
        tool_format: str,
        *,
        tools: Sequence[dict[str, Any]] = (),
        reasoning: str = "auto",
        in_reasoning: bool = False,
    ) -> None:
        self._cursor = Cursor()
        self._sink = _Sink(TOOL_FORMATS[tool_format], separate=reasoning != "none")
        marks = _REASONING_MARKS.get(reasoning, TOOL_FORMATS[tool_format].reasoning)
        begun = self._cursor, self._sink, ToolSchemas(tools), in_reasoning
        is_harmony = TOOL_FORMATS[tool_format].is_harmony
        self._reading = _read_harmony(*begun) if is_harmony else _read_tagged(*begun, marks)

    def push(self, text: str) -> list[Event]:
        self._cursor.feed(text)
        next(self._reading, None)
        return self._sink.take()

    def finish(self) -> list[Event]:
        """Call once, after the last push."""
        self._cursor.is_final = True
        for _ in self._reading:
            raise AssertionError("a grammar waits for text after its end")
        self._sink.finish()
        return self._sink.take()


def parse_output(text: str, tool_format: str, **options: Any) -> ParsedOutput:
    """The whole output at once; `options` are those of OutputParser."""
    parser = OutputParser(tool_format, **options)
    return fold([*parser.push(text), *parser.finish()])


def fold(events: Iterable[Event]) -> ParsedOutput:
    events = list(events)
    return ParsedOutput(
        content="".join(event.text for event in events if isinstance(event, Content)),
        reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
        calls=[event for event in events if isinstance(event, ToolCall)],
    )


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbours that are texts of one kind, as one."""
    result: list[Event] = []
    for _, group in itertools.groupby(events, key=type):
        first, *rest = group
        if isinstance(first, ToolCall):
            result += [first, *rest]
        else:
            texts = [event.text for event in rest if not isinstance(event, ToolCall)]
            result.append(type(first)("".join([first.text, *texts])))
    return result


def begins_in_reasoning(tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends with open reasoning, which the output then continues."""
    header = tokenizer.decode(
        prompt_ids[-_HEADER_TOKENS:], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return header.rstrip().endswith((*THINK, *_REASONING_MARKS["mistral"], _ANALYSIS))


class _Sink:
    """Collects events; numbers the calls."""

    def __init__(self, tool_format: ToolFormat, *, separate: bool) -> None:
        self.format = tool_format
        self.separate = separate
        self.patience = _PATIENCE
        self._events: list[Event] = []
        self._ids: set[str] = set()
        self.content = _Channel(self._events, Content)
        self.reasoning = self.content
        if separate:
            self.reasoning = _Channel(self._events, Reasoning)
            self.reasoning.cut()  # it is stripped

    @property
    def num_calls(self) -> int:
        return len(self._ids)

    def add(self, calls: list[WrittenCall]) -> None:
        self.content.cut()
        for call in calls:
            known = call.id is None or call.id in self._ids
            call_id = self.format.new_id() if known else call.id
            assert call_id is not None
            self._events.append(ToolCall(self.num_calls, call_id, call.name, call.arguments))
            self._ids.add(call_id)

    def take(self) -> list[Event]:
        """The events since the last time."""
        events = joined(self._events)
        self._events.clear()
        return events

    def finish(self) -> None:
        self.content.finish()
        if self.separate:
            self.reasoning.finish()


class _Channel:
    """One kind of text, from which calls and other channels are cut out.

    White space around a cut is dropped, and the texts that it separates become lines. Text without
    a cut is not changed.
    """

    def __init__(self, events: list[Event], kind: type[Reasoning] | type[Content]) -> None:
        self._events = events
        self._kind = kind
        self._held: list[str] = []  # white space that a cut would drop
        self._is_at_cut = False
        self._was_cut = False
        self._has_text = False
        self.is_fresh = True  # nothing was written, or nothing but reasoning

    def write(self, text: str) -> None:
        if self._is_at_cut:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._held.append("\n" if self._is_at_cut and self._has_text else "")
            self._events.append(self._kind("".join(self._held) + body))
            self._held.clear()
            self._is_at_cut, self._has_text, self.is_fresh = False, True, False
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def cut(self) -> None:
        self._held.clear()
        self._is_at_cut = self._was_cut = True

    def finish(self) -> None:
        if self._held and not self._was_cut:
            self._events.append(self._kind("".join(self._held)))


class _Marks:
    def __init__(self, *words: str) -> None:
        # Longest first: of two marks that begin alike the longer one is meant.
        longest_first = sorted(words, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._prefixes = {word[:end] for word in words for end in range(1, len(word))}
        self._longest = len(longest_first[0])

    def begun(self, text: str, start: int) -> int:
        """Length of the longest suffix of text[start:] that may become a mark."""
        for begin in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[begin:] in self._prefixes:
                return len(text) - begin
        return 0


_marks = functools.cache(_Marks)


def _write_until(cursor: Cursor, channel: _Channel, marks: _Marks) -> Reading[str | None]:
    """Everything before the next mark goes to `channel`; returns the mark, None at the end."""
    while True:
        if found := marks.pattern.search(cursor.text, cursor.pos):
            channel.write(cursor.text[cursor.pos : found.start()])
            cursor.pos = found.end()
            return found[0]
        end = len(cursor.text)
        if not cursor.is_final:
            end -= marks.begun(cursor.text, cursor.pos)
        channel.write(cursor.text[cursor.pos : end])
        cursor.pos = end
        if cursor.is_final:
            return None
        cursor.forget()
        yield


def _read_tagged(
    cursor: Cursor,
    sink: _Sink,
    tools: ToolSchemas,
    in_reasoning: bool,
    reasoning: Mapping[str, str],
) -> Reading[None]:
    """Content with marks around reasoning and before calls."""
    form = sink.format
    opens, sections = (form.opens, form.sections) if tools else ({}, ())
    marks = _marks(*reasoning, *opens, *sections)
    if in_reasoning:
        yield from _read_reasoning(cursor, sink, "", _marks(*reasoning.values()))
    while True:
        if form.start and tools and sink.content.is_fresh and not sink.num_calls:
            yield from _read_start(cursor, sink, tools, *form.start)
        mark = yield from _write_until(cursor, sink.content, marks)
        if mark is None:
            return
        if mark in reasoning:
            yield from _read_reasoning(cursor, sink, mark, _marks(reasoning[mark]))
        elif mark in opens:
            yield from _read_call(cursor, sink, tools, opens[mark], mark)
        else:
            sink.content.cut()


def _read_reasoning(cursor: Cursor, sink: _Sink, opened: str, closes: _Marks) -> Reading[None]:
    was_fresh = sink.content.is_fresh
    if sink.separate:
        sink.content.cut()
    else:
        sink.content.write(opened)
    mark = yield from _write_until(cursor, sink.reasoning, closes)
    if sink.separate:
        sink.reasoning.cut()
    else:
        sink.content.write(mark or "")
        sink.content.is_fresh = was_fresh


def _read_start(
    cursor: Cursor, sink: _Sink, tools: ToolSchemas, first: str, grammar: Grammar
) -> Reading[None]:
    begin = cursor.pos
    yield from cursor.skip()
    sink.content.write(cursor.text[begin : cursor.pos])
    if (yield from cursor.literal(first)):
        yield from _read_call(cursor, sink, tools, grammar, first, first_is_read=True)


def _read_call(
    cursor: Cursor,
    sink: _Sink,
    tools: ToolSchemas,
    grammar: Grammar,
    mark: str,
    *,
    first_is_read: bool = False,
) -> Reading[None]:
    """After `mark`. If there is no call, only the mark is content, and the rest is read anew.

    first_is_read: the mark belongs to the grammar.
    """
    begin = cursor.pos
    try:
        if sink.patience <= 0:
            raise NotACall
        if first_is_read:
            cursor.pos -= len(mark)
        calls = yield from grammar(cursor, tools)
    except NotACall:
        sink.patience -= _ATTEMPT + cursor.pos - begin
        cursor.pos = begin
        sink.content.write(mark)
    else:
        sink.add(calls)


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HARMONY_MARKS = _marks(_START, _CHANNEL, _MESSAGE, *_HARMONY_ENDS)
_BODY_ENDS = _marks(_START, _CHANNEL, *_HARMONY_ENDS)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def _read_harmony(
    cursor: Cursor, sink: _Sink, tools: ToolSchemas, in_reasoning: bool
) -> Reading[None]:
    if in_reasoning:
        yield from _read_body(cursor, sink, sink.reasoning)
    while True:
        mark = yield from _write_until(cursor, sink.content, _HARMONY_MARKS)
        if mark is None:
            return
        if mark in _HARMONY_ENDS:
            sink.content.cut()
            continue
        begin = cursor.pos
        header = mark
        try:
            if mark != _MESSAGE:
                header += yield from cursor.until(_MESSAGE, _MAX_HEADER)
        except NotACall:
            cursor.pos = begin
            sink.content.write(mark)
            continue
        name = _function_of(header, tools)
        if name is not None:
            yield from _read_harmony_call(cursor, sink, header, name)
        else:
            channel = _CHANNEL_NAME.search(header)
            is_analysis = channel is not None and channel[1] == "analysis"
            yield from _read_body(cursor, sink, sink.reasoning if is_analysis else sink.content)


def _function_of(header: str, tools: ToolSchemas) -> str | None:
    """The function that a message with this header calls."""
    recipient = _RECIPIENT.search(header)
    if recipient is None or not tools:
        return None
    name = recipient[1].removeprefix("functions.")
    return name if name != recipient[1] or name in tools else None


def _read_body(cursor: Cursor, sink: _Sink, channel: _Channel) -> Reading[None]:
    sink.content.cut()
    mark = yield from _write_until(cursor, channel, _BODY_ENDS)
    if mark in (_START, _CHANNEL):
        cursor.pos -= len(mark)
    channel.cut()


def _read_harmony_call(cursor: Cursor, sink: _Sink, header: str, name: str) -> Reading[None]:
    pieces: list[Event] = []
    body = _Channel(pieces, Content)
    mark = yield from _write_until(cursor, body, _BODY_ENDS)
    if mark in (_START, _CHANNEL):
        cursor.pos -= len(mark)
    body.finish()
    text = fold(pieces).content
    if mark and not text.strip():
        text = "{}"
    try:
        sink.add([written_call(name, loads_written(text))])
    except (NotACall, ValueError):
        sink.content.write(header + _MESSAGE * (header != _MESSAGE) + text)
        sink.content.cut()
