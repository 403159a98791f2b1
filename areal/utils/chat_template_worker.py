"""Child process of chat_template.py that renders templates until its parent closes the channel.

    out  an empty frame once it is ready; then for each call
    in   {"template": number, "text": only the first time}, {"chats", "tools", "variables"}
    out  {"texts": [...]} | {"error": text} | {"limit": the limit that was exceeded}

Excessive CPU time ends this process: a template cannot catch the kernel's timer. Templates are
rendered as transformers does it, with the same names and options, but without importing it: that
takes a second and a half, and every process that has a tokenizer starts one of these.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json, to_json

from areal.api.json_text import well_formed
from areal.utils import stacks
from areal.utils.channel import Channel
from areal.utils.limited_process import cpu_time, limit_resources

CPU_S = 5.0
MEMORY_BYTES = 1 << 30
OUTPUT_FACTOR, OUTPUT_CHARS = 4, 1 << 20  # output characters: chat bytes * factor + constant


def main(fd: str) -> None:
    stacks.listen()
    channel = Channel(socket.socket(fileno=int(fd)))
    os.dup2(2, 1)  # printed text is for the log
    limit_resources(MEMORY_BYTES)
    templates: dict[int, str] = {}
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        channel.send()
        while True:
            head, order = channel.receive()
            named = from_json(head)
            template = templates.setdefault(named["template"], named.get("text"))
            channel.send(to_json(answer(template, order)))


def answer(template: str, order: bytes | bytearray) -> dict[str, Any]:
    """The rendered chats, or why there are none."""
    with cpu_time(CPU_S):
        return _rendered(template, order)


def _rendered(template: str, order: bytes | bytearray) -> dict[str, Any]:
    call, max_chars = from_json(order), OUTPUT_FACTOR * len(order) + OUTPUT_CHARS
    try:
        compiled = _compiled(template)
        variables = {"documents": None, **call["variables"]}
        texts = [
            compiled.render(
                messages=chat, tools=call["tools"], add_generation_prompt=True, **variables
            )
            for chat in call["chats"]
        ]
        if sum(map(len, texts)) > max_chars:
            return {"limit": f"{max_chars} characters of text"}
        return {"texts": [well_formed(text) for text in texts]}
    except MemoryError:
        return {"limit": f"{MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"limit": "the deepest recursion Python allows"}
    except Exception as error:  # a template is a program: it can raise anything
        return {"error": well_formed(f"{type(error).__name__}: {error}"[:300])}


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for a loss mask; the text is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's own escapes of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
