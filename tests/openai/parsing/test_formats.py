"""Each format: several calls, text around them, reasoning before them, and what is no call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_output import MARKED, TOOLS, WRITERS, harmony, llama, mistral_list, parse, qwen_xml

from areal.openai.parsing.formats import TOOL_FORMATS, format_of_template
from areal.openai.parsing.parser import parse_output

ARGUMENTS = {"a": 1, "text": "ü 😀\n </x> '\"", "items": [1, {"k": None}]}
ADD, SUB = ("add", ARGUMENTS), ("sub", {})


@pytest.mark.parametrize("name", MARKED)
def test_calls_and_the_text_around_them(name):
    add, sub = MARKED[name](*ADD), MARKED[name](*SUB)
    assert parse(add, name) == ("", "", [ADD])
    assert parse(f"So: \n{add}\n{sub}", name) == ("So:", "", [ADD, SUB])
    assert parse(f" a {add} b {sub} c ", name) == (" a\nb\nc", "", [ADD, SUB])
    assert parse("just text ", name) == ("just text ", "", [])


@pytest.mark.parametrize("name", MARKED)
def test_no_call_is_made_in_reasoning(name):
    add, sub = MARKED[name](*ADD), MARKED[name](*SUB)
    assert parse(f"<think>\nhm {add}\n</think>\n\n{sub} ok", name) == ("ok", f"hm {add}", [SUB])
    assert parse(f"{add}</think>{sub}", name, in_reasoning=True) == ("", add, [SUB])
    assert parse(f"<think>{add}", name) == ("", add, [])
    assert parse(f"a <think>{add}</think> b {sub}", name) == ("a\nb", add, [SUB])
    inlined = f"<think> {add}</think> b"
    assert parse(inlined, name, reasoning="none") == (inlined, "", [])


@pytest.mark.parametrize("name", WRITERS)
def test_without_tools_there_are_no_calls(name):
    text = WRITERS[name](*ADD)
    assert parse_output(text, name).calls == []
    if name != "gpt-oss":
        assert parse_output(text, name).content == text


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_is_text(name):
    text = WRITERS[name](*ADD)
    for end in range(1, len(text)):
        content, reasoning, calls = parse(text[:end], name)
        assert reasoning == "" and calls in ([], [ADD])
        if not calls and name not in ("kimi_k2", "deepseek_v3", "gpt-oss"):
            assert content == text[:end]


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("hermes", "\n</tool_call>"),
        ("qwen3_coder", "</tool_call>"),
        ("deepseek_v31", "<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_call_end|><|tool_calls_section_end|>"),
        ("gpt-oss", "<|call|>"),
    ],
)
def test_a_whole_call_may_lack_its_closing_mark_at_the_end(name, close):
    text = WRITERS[name](*ADD)
    assert text.endswith(close)
    assert parse(text.removesuffix(close), name) == ("", "", [ADD])


CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    "body",
    [
        "",
        "text",
        "[]",
        "{broken",
        "{}",
        '{"name": ""}',
        '{"name": 3}',
        r'{"name": "a\u0000b"}',
        '{"name": "' + "n" * 300 + '"}',
        '{"name": "add", "arguments": 3}',
        '{"name": "add", "arguments": null}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}",
        '{"name": "add", "arguments": {"a": "line\nbreak"}}',
        CALL + "}",
        CALL + " and more",
        CALL + CALL,
    ],
)
def test_what_is_no_call_is_text(body):
    text = f"<tool_call>{body}</tool_call>"
    assert parse(text) == (text, "", [])
    assert parse(f"{text} {qwen_xml(*SUB)}", "qwen") == (text, "", [SUB])
    if body not in ("", "text", CALL + CALL):
        assert parse(body, "llama") == (body, "", [])


def test_a_call_is_found_after_a_broken_one():
    broken = "<tool_call>{broken"
    assert parse(f"{broken} <tool_call>{CALL}</tool_call>") == (broken, "", [("add", {"a": 1})])
    assert parse("<tool_call> <think> </tool_call>" + CALL) == (
        "<tool_call>", "</tool_call>" + CALL, [],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        (r'{"a": "\ude00\ud83d\ude00"}', {"a": "\ufffd\U0001f600"}),
        (r'{"\udfff": "\\ud83d"}', {"\ufffd": r"\ud83d"}),
        ('{"a": "\ud83d"}', {"a": "\ufffd"}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": "</tool_call><think>"}', {"a": "</tool_call><think>"}),
    ],
)
def test_arguments_written_strangely(arguments, read):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse(text) == ("", "", [("f", read)])
    (call,) = parse_output(text, "hermes", tools=TOOLS).calls
    call.arguments.encode()


def test_arguments_are_json_in_a_text():
    (call,) = parse_output(MARKED["hermes"](*ADD), "hermes", tools=TOOLS).calls
    assert "ü" in call.arguments and call.id.startswith("call_")
    assert call.as_dict()["function"] == {"name": "add", "arguments": call.arguments}
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    (call,) = parse_output(text, "hermes", tools=TOOLS).calls
    assert call.arguments == '{"a": 1}'


# Qwen's XML


def test_a_value_may_contain_tags():
    html = "<parameter=x></parameter> </parameter>\n<b></function>"
    text = qwen_xml("add", {"text": html})
    assert parse(text, "qwen3_coder") == ("", "", [("add", {"text": html})])


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("I look. <function=add>\n</function>\n</tool_call>", "I look.", ["add"]),
        ("<function=add></function> and", "and", ["add"]),
        ("<tool_call><function=add></function> and", "<tool_call> and", ["add"]),
        ("<tool_call><function=></function></tool_call>", None, []),
        ("<tool_call><function=add>a</function></tool_call>", None, []),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", None, []),
        (f"<function={'f' * 300}></function>", None, []),
    ],
)
def test_qwen_xml(text, content, names):
    found, _, calls = parse(text, "qwen3_coder")
    assert [name for name, _ in calls] == names
    assert found.replace("\n", " ") == (text if content is None else content)


# Llama


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (llama(*ADD), "", ["add"]),
        (f" {llama(*ADD)}; {llama(*SUB)}\n", "", ["add", "sub"]),
        (f"<|python_tag|>{llama(*ADD)}\n{llama(*SUB)}", "", ["add", "sub"]),
        (f"I look.<|python_tag|>{llama(*ADD)}", "I look.", ["add"]),
        ('{"type": "function", "name": "add"}', "", ["add"]),
        ('{"answer": 3}', None, []),
        ('{"name": "add"} and more', None, []),
        ('Here: {"name": "add"}', None, []),
        ("<|python_tag|>print(3)", None, []),
        ("text", None, []),
    ],
)
def test_llama(text, content, names):
    found, _, calls = parse(text, "llama3_json")
    assert found == (text if content is None else content)
    assert [name for name, _ in calls] == names


def test_llama_after_reasoning():
    text = llama(*SUB)
    assert parse(f"<think>{text}</think>\n{text}", "llama") == ("", text, [SUB])
    assert parse(f"{text}</think> {text}", "llama", in_reasoning=True) == ("", text, [SUB])
    inlined = f"<think>{text}</think>"
    assert parse(f"{inlined}\n{text}", "llama", reasoning="none") == (inlined, "", [SUB])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[add(a=1), sub()]", [("add", {"a": 1}), SUB]),
        (" [ add ( a = -1.5 , )]", []),
        ("[add( a = -1.5 , ) ]\n", [("add", {"a": -1.5})]),
        (r"""[add(text='a\'b\n\x41\u00fc\d', b="\"")]""",
         [("add", {"text": "a'b\nAü\\d", "b": '"'})]),
        ("[add(items=[1, (2, 3), {'k': None, \"l\": True}])]",
         [("add", {"items": [1, [2, 3], {"k": None, "l": True}]})]),
        ("<|python_start|>[sub()]<|python_end|>", [SUB]),
        ("[tools.sub()]", [("tools.sub", {})]),
        (r"[add(text='\ud83d')]", [("add", {"text": "\ufffd"})]),
    ],
)  # fmt: skip
def test_pythonic(text, calls):
    content = "" if calls else text
    assert parse(text, "pythonic") == (content, "", calls)
    assert parse(f"<think>{text}</think>{text}", "pythonic") == (
        content.strip(),
        text.strip(),
        calls,
    )


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2] is a list",
        "[]",
        "[add(1)]",
        "[add(a=b)]",
        "[add(a=1+1)]",
        "[add(a=f())]",
        "[add(a=__import__('os'))]",
        "[add(a='x' 'y')]",
        "[add(a=1)] and",
        "[add(a={1: 2})]",
        "[add(a=1e999)]",
        r"[add(a='\U00110000')]",
        "[add(a=" + "[" * 40 + "]" * 40 + ")]",
        "[add(a=" + "-" * 500 + "1)]",
    ],
)
def test_what_is_not_pythonic_is_text(text):
    assert parse(text, "pythonic") == (text, "", [])


# Mistral, Kimi: ids


def test_mistral():
    two = mistral_list(*ADD)[:-1] + ', {"name": "sub", "arguments": {}, "id": "Abc123xyz"}]'
    assert parse(f"hi {two} ok", "mistral") == ("hi\nok", "", [ADD, SUB])
    first, second = parse_output(two, "mistral", tools=TOOLS).calls
    assert len(first.id) == 9 and first.id.isalnum() and second.id == "Abc123xyz"
    text = '[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1}[TOOL_CALLS]sub{}'
    assert parse(text, "mistral") == ("", "", [("add", {"a": 1}), SUB])
    assert parse_output(text, "mistral", tools=TOOLS).calls[0].id == "abc123xyz"
    assert parse(f"[THINK]{text}[/THINK]Hm.", "mistral") == ("Hm.", text, [])
    for broken in ("[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS][3]", "[TOOL_CALLS]add[ARGS]3"):
        assert parse(broken, "mistral") == (broken, "", [])


def test_kimi_keeps_its_ids():
    call = "<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, second = parse_output(call * 2, "kimi_k2", tools=TOOLS).calls
    assert first.id == "functions.add:3" and first.name == second.name == "add"
    assert second.id != first.id


def test_deepseek_names():
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    text = f"{begin}function<｜tool▁sep｜>{{}}{end}"  # V3.1, a tool of this name
    assert parse(text, "deepseek_v3") == ("", "", [("function", {})])
    text = f"{begin}other<｜tool▁sep｜>add\n```json\n{{}}\n```{end}"
    assert parse(text, "deepseek_v3") == (text, "", [])


# gpt-oss


def message(channel: str, text: str, end: str = "<|end|>") -> str:
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}{end}"


THOUGHT = message("analysis", "Hm. to=functions.add {}").removeprefix("<|start|>assistant")


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (THOUGHT + message("final", "Hi.", "<|return|>"), "Hi.", "Hm. to=functions.add {}", []),
        (THOUGHT + message("commentary", "I look.") + harmony(*ADD) + harmony(*SUB),
         "I look.", "Hm. to=functions.add {}", [ADD, SUB]),
        ("<|channel|>final<|message|>Hi", "Hi", "", []),
        (harmony(*ADD).removesuffix("<|call|>"), "", "", [ADD]),
        ("<|start|>assistant to=functions.sub<|channel|>commentary json<|message|><|call|>",
         "", "", [SUB]),
        (message("analysis to=functions.sub", "{}", "<|call|>"), "", "", [SUB]),
        (message("commentary to=sub", "{}", "<|call|>"), "", "", [SUB]),
        (message("commentary to=python", "1 + 1", "<|call|>"), "1 + 1", "", []),
        (message("analysis", "a") + message("analysis", "b"), "", "a\nb", []),
        # Marks that are left out.
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "b", "a", []),
        ("plain text", "plain text", "", []),
        ("<|message|>Hi", "Hi", "", []),
        # What is no call, in the model's own words.
        (message("commentary to=functions.add", "{broken", "<|call|>"),
         "<|start|>assistant<|channel|>commentary to=functions.add<|message|>{broken", "", []),
        ("<|channel|>analy", "<|channel|>analy", "", []),
        ("<|start|>" + "x" * 600 + "<|message|>Hi", "<|start|>" + "x" * 600 + "\nHi", "", []),
    ],
)  # fmt: skip
def test_harmony(text, content, reasoning, calls):
    assert parse(text, "gpt-oss") == (content, reasoning, calls)


def test_harmony_that_begins_in_its_analysis():
    text = "Hm.<|end|>" + message("final", "Hi.")
    assert parse(text, "gpt-oss", in_reasoning=True) == ("Hi.", "Hm.", [])
    assert parse(text, "gpt-oss", in_reasoning=True, reasoning="none") == ("Hm.\nHi.", "", [])


# The table


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from(sorted(WRITERS)), st.lists(values, max_size=3), st.integers(), st.text())
def test_any_arguments_come_back(name, items, number, text):
    arguments = {"items": items, "a": number, "text": text}
    if name == "pythonic":
        text = text.encode("ascii", "backslashreplace").decode()
        arguments = json.loads(json.dumps(arguments).encode())
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    if name in ("qwen3_coder", "glm45") and ("<" in text or "<" in json.dumps(items)):
        return
    assert parse(WRITERS[name]("add", arguments), name) == ("", "", [("add", arguments)])


def test_every_format_has_a_case():
    assert {id(TOOL_FORMATS[name]) for name in WRITERS} == {id(f) for f in TOOL_FORMATS.values()}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>{{ tool_call.name }}</tool_call>", "hermes"),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("[func_name1(params_name1=params_value1), func_name2()]", "pythonic"),
        ("{{- '[TOOL_CALLS]' }}", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>final", "gpt-oss"),
        ("{{ messages }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_format_follows_the_chat_template(template, name):
    assert format_of_template(template) == name
