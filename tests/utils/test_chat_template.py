"""Chat templates: what transformers renders, and nothing that takes the machine down."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agent_world import CHAT_TEMPLATE, build_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.utils import chat_template
from areal.utils.chat_template import (
    MAX_INPUT,
    TemplateError,
    TemplateLimitError,
    render_chat,
    render_chats,
)
from areal.utils.child_process import module_argv

HELLO = [{"role": "user", "content": "hello"}]
CALL = struct.pack("!QQQ", 2, 15, 2) + b'{"template": 0}' + b"{}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_chat_tokenizer(tmp_path_factory.mktemp("model folder"))


@pytest.fixture
def with_template(tokenizer):
    def changed(template):
        tokenizer.chat_template = template
        tokenizer.name_or_path = "/models/hostile"
        return tokenizer

    yield changed
    tokenizer.chat_template = CHAT_TEMPLATE


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
chats = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": texts}
    ),
    min_size=1,
    max_size=4,
)
functions = st.fixed_dictionaries({"name": texts, "arguments": st.dictionaries(texts, texts)})


@settings(max_examples=40)
@given(chats, st.none() | st.lists(functions, min_size=1, max_size=2), texts)
def test_it_is_what_transformers_renders(tokenizer, chat, tools, system):
    tokenizer.chat_template = "{{ system }}|{{ bos_token }}{{ eos_token }}|" + CHAT_TEMPLATE
    expected = tokenizer.apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True, system=system
    )
    assert render_chat(tokenizer, chat, tools=tools, variables={"system": system}) == expected
    ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
    whole = tokenizer.apply_chat_template(
        chat, tools=tools, add_generation_prompt=True, return_dict=False, system=system
    )
    assert ids == whole
    tokenizer.chat_template = CHAT_TEMPLATE


@pytest.mark.parametrize(
    "template",
    [
        "{%- for m in messages %}\n  {%- if loop.index0 == 1 %}{% break %}{% endif %}\n{{ m.role }}"
        "\n{%- endfor %}|{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
        "{{ m.content }}{% endfor %}",
        "{% set seen = namespace(n=0) %}{% set x = 1 %}{% for m in messages %}{% generation %}"
        "{% set x = 2 %}{% set seen.n = seen.n + 1 %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ x }}{{ seen.n }}",
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ '<é>&' | tojson }}|"
        "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True) }}"
        "{{ [1, 2] | tojson(separators=(',', ':')) }}",
        "{% macro say(m) %}\n    {{ m.role | upper }}: {{ m.content | trim }}\n{% endmacro %}\n"
        "{{ say(messages[-1]) }}{{ documents is none }}{{ tools is none }}{{ nothing is defined }}",
        "{{ strftime_now('%Y') | length }}{% if add_generation_prompt %}>{% endif %}{{ late }}",
        "{% set roles = messages | map(attribute='role') | list %}{{ roles | unique | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}\n\n  {# note #}\n!",
    ],
)
def test_templates_of_every_make_are_rendered_alike(with_template, template):
    chat = [
        {"role": "user", "content": " <hi> & \u2603\n"},
        {"role": "assistant", "content": "é"},
        {"role": "user", "content": "again"},
    ]
    tokenizer = with_template(template)
    expected = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, late=True
    )
    assert render_chat(tokenizer, chat, variables={"late": True}) == expected


def test_long_chats_have_long_texts(tokenizer):
    long = [{"role": "user", "content": "x" * 5_000_000}]
    assert len(render_chat(tokenizer, long, variables={})) > 5_000_000


def test_many_chats_at_once(tokenizer):
    chats = [[{"role": "user", "content": str(number)}] for number in range(100)]
    found = render_chats(tokenizer, chats, variables={})
    assert found == [render_chat(tokenizer, chat, variables={}) for chat in chats]
    assert render_chats(tokenizer, [], variables={}) == []


BOMBS = {
    "a product": "{{ 'x' * 10**10 }}",
    "a constant": "{% set x = 'x' * 10**11 %}",
    "a list": "{{ [0] * 10**10 }}",
    "a power": "{{ 7 ** (10**9) }}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(50) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "adding": "{% set ns = namespace(x='x') %}{% for i in range(50) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a format": "{{ '{:>10000000000}'.format(1) }}",
    "a method": "{{ 'x'.ljust(10**10) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "indent": "{{ 'a\\nb' | indent(10**10) }}",
    "replace": "{% set ns = namespace(x='xx') %}{% for i in range(40) %}"
    "{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
    "join": "{{ (['x' * 10**6] * 10**5) | join }}",
    "json": "{{ [[]] | tojson(indent=10**10) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "output": "{% for i in range(90000) %}{{ 'x' * 10**5 }}{% endfor %}",
    "some text": "{{ 'x' * 2000000 }}",
    "the request": "{% for m in messages %}{{ m.content * 10**10 }}{% endfor %}",
}
ENDLESS = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
}
LIMITED = (
    "a product",
    "some text",
    "doubling",
    "a format",
    "join",
    "the request",
    "loops",
    "a macro",
)
DEEP = {
    "a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}


@pytest.mark.parametrize("name", [*BOMBS, *ENDLESS, *DEEP])
def test_a_template_that_takes_too_much_is_ended(with_template, name):
    hostile = with_template((BOMBS | ENDLESS | DEEP)[name])
    before = max_rss_bytes()
    with pytest.raises((TemplateLimitError, TemplateError)) as caught:
        render_chat(hostile, HELLO, variables={})
    # Some are refused as mistakes (an index too large), before they take anything.
    assert name not in LIMITED or isinstance(caught.value, TemplateLimitError)
    if isinstance(caught.value, TemplateLimitError):
        assert "the chat template of /models/hostile takes more than" in str(caught.value)
    assert max_rss_bytes() - before < 1 << 28, "this process took none of it"
    assert render_chat(with_template(CHAT_TEMPLATE), HELLO, variables={})


def max_rss_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.nothing.at_all }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_a_template_that_refuses(with_template, template, says):
    with pytest.raises(TemplateError, match=says):
        render_chat(with_template(template), HELLO, variables={})


def test_what_is_no_chat(tokenizer):
    with pytest.raises(TemplateError, match="cannot be written as JSON"):
        render_chat(tokenizer, [{"role": "user", "content": "\ud83d"}], variables={})
    with pytest.raises(TemplateError, match="expected at most"):
        render_chat(tokenizer, [{"role": "user", "content": "x" * MAX_INPUT}], variables={})
    with pytest.raises(TemplateError, match="multiple values"):
        render_chat(tokenizer, HELLO, variables={"messages": []})


def test_half_a_character_of_the_template_is_replaced(with_template):
    assert render_chat(with_template(r"{{ '\ud83d' }}!"), HELLO, variables={}) == "\ufffd!"


def test_threads_share_a_few_children(tokenizer):
    chats = [[{"role": "user", "content": str(number)}] for number in range(200)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda chat: render_chat(tokenizer, chat, variables={}), chats))
    assert found == render_chats(tokenizer, chats, variables={})
    assert 1 <= len(chat_template._children._free) <= 4


def test_a_fork_has_children_of_its_own(tokenizer):
    """Else two processes would write to one pipe, and read each other's texts."""
    render_chat(tokenizer, HELLO, variables={})
    pid = os.fork()
    if pid == 0:
        chat = [{"role": "user", "content": "fork"}]
        ok = all("fork" in render_chat(tokenizer, chat, variables={}) for _ in range(50))
        chat_template._children.close()
        os._exit(0 if ok else 1)
    for number in range(50):
        chat = [{"role": "user", "content": f"parent {number}"}]
        assert f"parent {number}" in render_chat(tokenizer, chat, variables={})
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_that_was_killed_is_replaced(tokenizer):
    render_chat(tokenizer, HELLO, variables={})
    for child in chat_template._children._free:
        child._process.kill()
        child._process.wait()
    assert "hello" in render_chat(tokenizer, HELLO, variables={})


def test_children_end_with_their_process_and_see_no_secret(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    code = f"""
import os
from areal.utils import chat_template
from areal.utils.tokenizer import load_hf_tokenizer, chat_prompt_ids
chat_prompt_ids([dict(role="user", content="x")], load_hf_tokenizer({str(tmp_path)!r}))
(child,) = chat_template._children._free
with open(f"/proc/{{child._process.pid}}/environ") as file:
    print("MY_SECRET_KEY" in file.read(), child._process.pid, flush=True)
os._exit(0)  # no clean-up
"""
    env = {**os.environ, "MY_SECRET_KEY": "0123456789"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=900, env=env
    )
    has_secret, pid = done.stdout.split()
    assert has_secret == "False", done.stderr
    deadline = time.monotonic() + 300
    while is_running(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("length", [0, 8, len(CALL) - 3, len(CALL) - 1])
def test_a_child_ends_in_silence_when_its_parent_was_killed_amid_a_call(length):
    ours, theirs = socket.socketpair()
    argv = module_argv("areal.utils.chat_template_worker", str(theirs.fileno()))
    with ours, theirs:
        child = subprocess.Popen(argv, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()])
        ours.sendall(CALL[:length])
    assert child.communicate(timeout=900)[1] == b""
    assert child.returncode == 0
