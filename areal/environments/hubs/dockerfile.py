"""What of a Dockerfile a sandbox session can do: copy, run, set the folder and variables.

    plan = read("FROM ubuntu:24.04\\nWORKDIR /app\\nCOPY data /app/data\\nRUN sort data/a > b\\n")
    plan.image, plan.workdir, plan.actions

No image is built or fetched: programs are those of this machine. What that cannot stand in for is
Unsupported, with the line: other stages, files of other images, archives, packages.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass, field

from areal.api.json_text import JsonError, loads

# About the container, which there is not, or the process it starts, which Harbor does not.
_WITHOUT_EFFECT = frozenset(
    {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "USER"}
)
_INSTALLERS = re.compile(
    r"(?:^|[;&|(]\s*|\bsudo\s+|-m\s+)(?:\S*/)?"
    r"(apt-get|apt|apk|dnf|microdnf|yum|pip3?|uv|conda|mamba|npm|npx|yarn|pnpm|cargo|gem|go|curl"
    r"|wget|git\s+clone)\b",
    re.MULTILINE,
)
_VARIABLE = re.compile(r"\\(\$)|\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$")


class Unsupported(ValueError):
    """A task that the sandbox cannot offer a world for."""


@dataclass(frozen=True, slots=True)
class Copy:
    sources: tuple[str, ...]  # patterns inside of the context
    target: str  # absolute; a folder if it ends with a slash


@dataclass(frozen=True, slots=True)
class Run:
    command: tuple[str, ...]
    workdir: str


@dataclass(slots=True)
class ImagePlan:
    image: str = ""
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)  # that RUN sees as variables, too
    actions: list[Copy | Run] = field(default_factory=list)


def read(text: str, *, skip_installs: bool = False) -> ImagePlan:
    """`skip_installs` leaves out commands that fetch packages, in place of refusing them."""
    plan, arguments = ImagePlan(), {}
    for number, keyword, rest in _instructions(text):
        try:
            _apply(plan, arguments, keyword, rest, skip_installs)
        except (Unsupported, ValueError) as error:
            raise Unsupported(f"environment/Dockerfile:{number}: {error}") from error
    if not plan.image:
        raise Unsupported("environment/Dockerfile has no FROM")
    return plan


def _apply(
    plan: ImagePlan, arguments: dict[str, str], keyword: str, rest: str, skip_installs: bool
) -> None:
    known = {**arguments, **plan.env}
    if keyword == "FROM":
        if plan.image:
            raise Unsupported("a second FROM: images of several stages cannot be stood in for")
        words = [word for word in _expanded(rest, known).split() if not word.startswith("--")]
        plan.image = words[0] if words else ""
    elif keyword == "WORKDIR":
        plan.workdir = posixpath.normpath(posixpath.join(plan.workdir, _expanded(rest, known)))
    elif keyword == "ENV":
        plan.env |= _assignments(rest, known)
    elif keyword == "ARG":
        given = {name: known.get(name, value) for name, value in _pairs(rest, known)}
        arguments |= given
        plan.arguments |= given if plan.image else {}
    elif keyword in ("COPY", "ADD"):
        plan.actions.append(_copy(keyword, rest, known, plan.workdir))
    elif keyword == "RUN":
        command, script = _command(rest)
        fetcher = _INSTALLERS.search(script)
        if fetcher is None:
            seen = [
                f"{key}={value}" for key, value in plan.arguments.items() if key not in plan.env
            ]
            plan.actions.append(Run(("env", *seen, *command) if seen else command, plan.workdir))
        elif not skip_installs:
            raise Unsupported(
                f"RUN uses {fetcher[1]}, and a sandbox installs and fetches nothing: install on "
                "this machine what it needs, and set env_kwargs.skip_installs to leave such "
                "lines out"
            )
    elif keyword not in _WITHOUT_EFFECT:
        raise Unsupported(f"{keyword} cannot be stood in for")


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line, keyword, rest), with continued lines joined."""
    found: list[tuple[int, str, str]] = []
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if begun else number
        begun += line
        if begun.rstrip().endswith("\\"):
            begun = begun.rstrip()[:-1] + " "
            continue
        keyword, *rest = begun.split(maxsplit=1)
        found.append((first, keyword.upper(), "".join(rest).strip()))
        begun = ""
    if begun:
        raise Unsupported(f"environment/Dockerfile:{first}: the last line is continued by none")
    return found


def _command(rest: str) -> tuple[tuple[str, ...], str]:
    """(argv, its text) of a RUN line."""
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        if not flag.startswith("--mount=type=cache"):
            raise Unsupported(f"RUN {flag} cannot be stood in for")
        rest = rest.lstrip()
    if "<<" in rest:
        raise Unsupported("RUN with a here-document cannot be stood in for; use && or a script")
    argv = _listed(rest)
    return (tuple(argv), " ".join(argv)) if argv else (("sh", "-c", rest), rest)


def _listed(rest: str) -> list[str] | None:
    """The texts of a JSON list; None for anything else, which a shell reads: `[ -f x ] && y`."""
    try:
        given = loads(rest) if rest.startswith("[") else None
    except JsonError:
        return None
    if given is not None and not (given and all(isinstance(word, str) for word in given)):
        raise Unsupported(f"{rest[:100]} must be a list of texts")
    return given


def _copy(keyword: str, rest: str, known: dict[str, str], workdir: str) -> Copy:
    if "<<" in rest:
        raise Unsupported(f"{keyword} of a here-document cannot be stood in for; use a file")
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        if not flag.startswith(("--chown=", "--link")):
            raise Unsupported(f"{keyword} {flag} cannot be stood in for")
        rest = rest.lstrip()
    words = _listed(rest) or shlex.split(rest)
    *sources, target = [_expanded(word, known) for word in words] or [""]
    if not sources:
        raise Unsupported(f"{keyword} needs a source and a target")
    for source in sources:
        if keyword == "ADD" and ("://" in source or _ARCHIVE.search(source)):
            raise Unsupported(f"ADD {source}: addresses and archives cannot be stood in for")
    is_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    path = posixpath.normpath(posixpath.join(workdir, target))
    return Copy(tuple(sources), path + "/" * is_folder)


def _assignments(rest: str, known: dict[str, str]) -> dict[str, str]:
    name, _, value = rest.partition(" ")
    if "=" not in name:  # the old form: ENV NAME VALUE
        return {name: _expanded(value.strip(), known)}
    return dict(_pairs(rest, known))


def _pairs(rest: str, known: dict[str, str]) -> list[tuple[str, str]]:
    parts = (word.partition("=") for word in shlex.split(rest))
    return [(name, _expanded(value, known)) for name, _, value in parts]


def _expanded(text: str, known: dict[str, str]) -> str:
    """With variables of ENV and ARG in place; others are empty, as in a build."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return "$"
        return known.get(found[2] or found[4], "") or found[3] or ""

    return _VARIABLE.sub(value, text)
