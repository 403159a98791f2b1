"""`areal chat RUN|FOLDER`: talk to a model in the terminal; replies appear as they are generated.

Lines come from stdin: each is a turn of the user. Without a terminal there is no prompt, so that
`echo "2+2=" | areal chat FOLDER` prints only replies. `/new` begins a new conversation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.evaluation.conversation import Conversation

NEW = "/new"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talks to a model: the final one of a run, a folder or a hub name. A line is a turn, "
        f"{NEW} begins a new conversation, Ctrl-D ends."
    )
    parser.add_argument("target", metavar="RUN|FOLDER", help="folder of a run or a model, hub name")
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument("--max-new-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most likely token")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> int:
    from areal.evaluation.targets import find_targets

    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if args.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}")
    (target,) = find_targets([args.target], checkpoints=False)
    if target.kind != "model":
        raise ValueError(f"{args.target}: expected the folder of a run or a model, or a hub name")
    from areal.evaluation.conversation import Conversation

    with Conversation(
        target.path,
        system=args.system,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
    ) as conversation:
        for line in _lines(is_tty=sys.stdin.isatty()):
            _answer(conversation, line)
    return 0


def _lines(*, is_tty: bool) -> Iterator[str]:
    while True:
        if is_tty:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _answer(conversation: Conversation, line: str) -> None:
    if line.strip() == NEW:
        return conversation.begin()
    try:
        conversation.say(line, _show)
    except ValueError as error:  # too long for the model's context, for example
        print(f"areal: {error} ({NEW} begins a new conversation)", file=sys.stderr)
    _show("\n")


def _show(text: Any) -> None:
    print(text, end="", flush=True)
