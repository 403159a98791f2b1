"""Child process of chat_template.py that renders templates until its parent closes the channel.

    out  an empty frame once it is ready; then for each call
    in   {"template": number, "text": only the first time}, {"chats", "tools", "variables"}
    out  {"texts": [...]} | {"error": text} | {"limit": the limit that was exceeded}

Excessive CPU time ends this process: a template cannot catch the kernel's timer.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from typing import Any

from pydantic_core import from_json, to_json
from transformers.utils.chat_template_utils import render_jinja_template

from areal.api.json_text import well_formed
from areal.utils.channel import Channel
from areal.utils.chat_template import CPU_S, MEMORY_BYTES, OUTPUT_CHARS, OUTPUT_FACTOR


def main(fd: str) -> None:
    channel = Channel(socket.socket(fileno=int(fd)))
    os.dup2(2, 1)  # printed text is for the log
    _limit_resources()
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
    call, max_chars = from_json(order), OUTPUT_FACTOR * len(order) + OUTPUT_CHARS
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        texts, _ = render_jinja_template(
            conversations=call["chats"],
            tools=call["tools"],
            chat_template=template,
            add_generation_prompt=True,
            **call["variables"],
        )
        if sum(map(len, texts)) > max_chars:
            return {"limit": f"{max_chars} characters of text"}
        return {"texts": [well_formed(text) for text in texts]}
    except MemoryError:
        return {"limit": f"{MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"limit": "the deepest recursion Python allows"}
    except Exception as error:  # a template is a program: it can raise anything
        return {"error": well_formed(f"{type(error).__name__}: {error}"[:300])}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_resources() -> None:
    """Limits on what is allocated from here on; the modules are already loaded."""
    _lower(resource.RLIMIT_DATA, _private_bytes() + MEMORY_BYTES)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    if sys.platform == "linux":
        _lower(resource.RLIMIT_NPROC, 0)


def _lower(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(kind, (wanted, wanted))


def _private_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0
