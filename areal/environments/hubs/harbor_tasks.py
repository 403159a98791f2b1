"""Harbor's task folders, as recipes for sandbox sessions.

In: what Harbor's own package read of a folder (bridge.py), and the user's options. Out: a Task with
the limits of its sessions, the files it begins with, its tests; or Unsupported, with what the task
needs that no sandbox has.

    task/instruction.md             what the model is told
    task/environment/               a Dockerfile and its files; without one, files of the workdir
    task/tests/test.sh              run by the grader alone; leaves a file of REWARDS
    task/task.toml                  limits and options
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal.environments.hubs.dockerfile import Copy, ImagePlan, Run, Unsupported, read
from areal.sandbox.limits import SessionLimits
from areal.sandbox.session_init import WORKSPACE

REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # in Harbor's order
_IMAGES = ("debian", "python", "ubuntu")  # that a machine with Python stands in for
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_MAX_DOCKERFILE = 1 << 20
# Keys of task.toml that ask for more than a sandbox has, by section.
_BEYOND = {
    "": ("steps",),
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir"),
    "verifier": ("environment", "collect"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`env_kwargs` of `harbor:FOLDER`."""

    interface: str = "commands"  # each reply is a shell command, or "tools": Python, shell, files
    instructions: str = ""  # a system message
    command_s: float = 30.0  # of one command; below `timeout_s` of the workflow
    max_commands: int = 64  # then the task is graded as it is
    max_disk_mb: int = 256  # files are kept in memory, whatever storage_mb says
    images: list[str] = field(default_factory=list)  # more that this machine stands in for
    skip_installs: bool = False  # leave out RUN lines that install; else the task is refused
    skip_unsupported: bool = False  # leave such tasks out; else they are refused
    writable: list[str] = field(default_factory=list)  # more folders of the task's own
    network: list[str] = field(default_factory=list)  # addresses, as in sandbox.network

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        known = cls.__dataclass_fields__
        for key in given:
            if key not in known:
                raise ValueError(
                    f"env_kwargs.{key}: unknown for harbor; expected one of {', '.join(known)}"
                )
            if key in ("images", "writable", "network") and not isinstance(given[key], list):
                raise ValueError(f"env_kwargs.{key}: expected a list, got {given[key]!r}")
        options = cls(**given)
        if options.interface not in ("commands", "tools"):
            raise ValueError(
                f"env_kwargs.interface must be 'commands' or 'tools', got {options.interface!r}"
            )
        if not isinstance(options.max_commands, int) or options.max_commands < 1:
            raise ValueError(
                f"env_kwargs.max_commands must be at least 1, got {options.max_commands!r}"
            )
        options.limits()  # what sessions check, now
        return options

    def limits(self) -> SessionLimits:
        return SessionLimits.of(
            {
                "wall_s": self.command_s,
                "cpu_s": self.command_s,
                "disk_mb": self.max_disk_mb,
                "writable": self.writable,
                "network": self.network,
            }
        )


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    folder: Path
    instruction: str
    limits: SessionLimits  # of the model's session
    grading: SessionLimits
    actions: tuple[Copy | Run, ...]

    @property
    def roots(self) -> list[str]:
        """Folders that the model's work is in."""
        work = [path for path in self.limits.writable if path != "/logs"]
        return [WORKSPACE, *work]

    def copied(self, action: Copy) -> bytes:
        """An archive for `write_tree("/")`."""
        return _pack(_copied(self.folder / "environment", action), self.limits)

    def tests(self) -> bytes:
        return _pack(_tree(self.folder / "tests", "/tests"), self.grading)


def task_of(given: Mapping[str, Any], options: Options) -> Task:
    """Unsupported, with the reason, for a task that cannot be run."""
    folder, config = Path(given["folder"]), given["config"]
    environment, verifier = config.get("environment") or {}, config.get("verifier") or {}
    for section, keys in _BEYOND.items():
        found = config.get(section) or {} if section else config
        for key in keys:
            if found.get(key):
                raise Unsupported(f"task.toml: {f'{section}.' if section else ''}{key} is not run")
    if environment.get("os", "linux") != "linux":
        raise Unsupported(f"task.toml: environment.os is {environment['os']!r}")
    if environment.get("network_mode") == "allowlist" and not options.network:
        raise Unsupported(
            f"task.toml: it needs {', '.join(environment.get('allowed_hosts') or ())}; list what "
            "it may reach in env_kwargs.network, as HOST:PORT"
        )
    plan = _plan(folder / "environment", environment, options)
    if environment.get("workdir"):
        plan.workdir = posixpath.normpath(environment["workdir"])
    env = {**plan.env, **_plain(environment.get("env"), "environment.env")}
    copies = [one for one in plan.actions if isinstance(one, Copy)]
    folders = [_target_folder(folder / "environment", one) for one in copies]
    folders += [plan.workdir, *(one.workdir for one in plan.actions if isinstance(one, Run))]
    own = {_root(path) for path in folders} - {WORKSPACE, "/"}
    limits = _limits(own, plan.workdir, environment, env, options)
    wall_s = float(verifier.get("timeout_sec", 600.0))
    more = _plain(verifier.get("env"), "verifier.env")
    try:
        grading = replace(
            limits,
            wall_s=wall_s,
            disk_mb=2 * limits.disk_mb,  # the tests need room, too
            cpu_s=wall_s * max(1, environment.get("cpus") or 1),
            writable=(*limits.writable, "/tests"),
            # The home is the model's: its packages there would run in each Python of the tests.
            env={"PYTHONNOUSERSITE": "1", **env, **more},
        )
    except ValueError as error:
        raise Unsupported(f"task.toml: verifier: {error}") from error
    if not (folder / "tests/test.sh").is_file():
        raise Unsupported("it has no tests/test.sh, which says what its work is worth")
    return Task(given["name"], folder, given["instruction"], limits, grading, tuple(plan.actions))


def _plan(folder: Path, environment: Mapping[str, Any], options: Options) -> ImagePlan:
    for name in _COMPOSE:
        if (folder / name).exists():
            raise Unsupported(f"environment/{name}: several containers cannot be stood in for")
    file, image = folder / "Dockerfile", environment.get("docker_image")
    if file.is_file():
        plan = read(_text(file), skip_installs=options.skip_installs)
        plan.image = image or plan.image
    else:
        plan = ImagePlan(image=image or "", workdir=WORKSPACE)
        plan.actions.append(Copy((".",), f"{WORKSPACE}/"))
    if plan.workdir == "/":
        plan.workdir = WORKSPACE
    if plan.image and not _stands_in(plan.image, [*_IMAGES, *options.images]):
        raise Unsupported(
            f"it needs the image {plan.image}; if this machine has what the task needs of it, "
            "list it in env_kwargs.images"
        )
    return plan


def _text(file: Path) -> str:
    """Unsupported if it cannot be read, is no text, or is too long to be meant."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_DOCKERFILE + 1)
    except OSError as error:
        raise Unsupported(f"environment/Dockerfile cannot be read: {error.strerror}") from error
    if len(data) > _MAX_DOCKERFILE:
        raise Unsupported(f"environment/Dockerfile has more than {_MAX_DOCKERFILE} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Unsupported(f"environment/Dockerfile is not UTF-8: {error}") from error


def _stands_in(image: str, accepted: list[str]) -> bool:
    name = image.removeprefix("docker.io/").removeprefix("library/")
    return image in accepted or name in accepted or name.partition(":")[0] in accepted


def _limits(
    own: set[str],
    workdir: str,
    environment: Mapping[str, Any],
    env: dict[str, str],
    options: Options,
) -> SessionLimits:
    basis = options.limits()
    try:
        return replace(
            basis,
            memory_mb=environment.get("memory_mb") or 2048,
            disk_mb=min(environment.get("storage_mb") or basis.disk_mb, basis.disk_mb),
            writable=tuple(sorted({*own, "/logs", *basis.writable})),
            workdir=workdir,
            env=env,
        )
    except ValueError as error:
        raise Unsupported(str(error)) from error


def _root(path: str) -> str:
    """The folder to own for `path`: the topmost, or two levels of a home."""
    parts = path.strip("/").split("/")
    count = 2 if parts[0] in ("home", "opt", "srv", "var", "mnt") else 1
    return "/" + "/".join(parts[:count])


def _plain(env: Mapping[str, str] | None, key: str) -> dict[str, str]:
    for name, value in (env or {}).items():
        if "${" in value:
            raise Unsupported(
                f"task.toml: {key}.{name} is a variable of the host, which no sandbox gets"
            )
    return dict(env or {})


Files = Iterator[tuple[str, Path, Path]]  # its path there, its path here, the folder to stay in


def _sources(context: Path, action: Copy) -> list[Path]:
    """Files and folders that it copies; Unsupported if there are none, or they lie elsewhere."""
    sources: list[Path] = []
    for pattern in action.sources:
        name = pattern.removeprefix("./").lstrip("/")
        try:
            found = sorted(context.glob(name)) if name not in ("", ".") else [context]
        except ValueError as error:
            raise Unsupported(f"environment/Dockerfile copies {pattern!r}: {error}") from error
        if not found:
            raise Unsupported(f"environment/Dockerfile copies {pattern!r}, which does not exist")
        sources += found
    for source in sources:
        _refuse_outside(source, context)
    return sources


def _target_folder(context: Path, action: Copy) -> str:
    """Which it writes to."""
    sources = _sources(context, action)  # first: it refuses what cannot be copied
    is_folder = action.target.endswith("/") or any(map(Path.is_dir, sources))
    folder = action.target if is_folder else posixpath.dirname(action.target)
    if not folder.strip("/"):
        raise Unsupported(
            "environment/Dockerfile copies to /, which is read-only in a session; copy to a folder "
            "such as /app"
        )
    return folder


def _copied(context: Path, action: Copy) -> Files:
    for source in _sources(context, action):
        if source.is_dir():
            yield from _tree(source, action.target, without=context / "Dockerfile")
        elif source != context / "Dockerfile":
            is_folder = action.target.endswith("/")
            target = action.target + source.name if is_folder else action.target
            yield target, source, context


def _tree(folder: Path, target: str, without: Path | None = None) -> Files:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != without:
            name = posixpath.join(target, path.relative_to(folder).as_posix())
            yield name, path, folder


def _refuse_outside(path: Path, folder: Path) -> None:
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise Unsupported(f"{path} leads out of its folder")


def _pack(files: Files, limits: SessionLimits) -> bytes:
    """Unsupported for what a session with `limits` has no room for, or nobody can read."""
    packed, left = io.BytesIO(), limits.disk_mb << 20
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, path, folder in files:
            _refuse_outside(path, folder)
            data, mode = _contents(path, left)
            left -= len(data)
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(data), mode | 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _contents(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """(bytes, mode) of a plain file. A pipe is not waited for, nor a device read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Unsupported(f"{path} is neither a file nor a folder")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise Unsupported(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise Unsupported(f"{path} does not fit any more; raise env_kwargs.max_disk_mb")
    return data, stat.S_IMODE(found.st_mode)
