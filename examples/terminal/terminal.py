"""Terminal tasks: folders in Harbor's layout, worked on in a sandbox and graded in a second one.

    task/instruction.md     what the model is told
    task/environment/       files that lie in its workspace (not its Dockerfile: no image is built)
    task/tests/             not shown to the model; `bash tests/test.sh` exits with 0 if all is well
    task/task.toml          verifier.timeout_sec, environment.memory_mb, environment.storage_mb

Each reply is a shell command, and its output the next observation. After `exit` the files of the
workspace are copied into a sandbox that no command of the model ran in; the tests join them there
and run. The reward is 1 if they pass, else 0. Files come over with their content alone.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from areal.dataset.chat_rows import Rows
from areal.environments.interface import EnvError
from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session
from areal.sandbox.sessions import SessionPool

TASKS = "examples/terminal/tasks"
PROMPT = "\n# "
MAX_FILES = 64  # that are graded


def load(path, split, tokenizer, max_length=None, tasks=TASKS, num_rows=None):
    """A row for each task: {"task": its folder}. All of them are in every split."""
    folders = sorted(file.parent for file in Path(tasks).glob("*/task.toml"))
    return Rows({"task": str(folder)} for folder in folders[:num_rows])


class Terminal:
    def __init__(self, command_s: float = 10.0, instructions: str = "") -> None:
        self.command_s = command_s
        self.instructions = instructions
        self.session = None

    async def reset(self, row):
        self.folder = Path(row["task"])
        self.limits = limits_of(self.folder)
        self.session = await Session.start(self.limits)
        for name, data in files_of(self.folder / "environment").items():
            if name != "Dockerfile":
                await self.session.write_file(name, data)
        task = (self.folder / "instruction.md").read_text(encoding="utf-8").strip()
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, {"role": "user", "content": task + PROMPT}]

    async def step(self, action):
        command = action.strip()
        if command == "exit":
            return "", await self._grade(), True
        result = await self.session.shell(command, wall_s=self.command_s)
        return result.text + PROMPT, 0.0, False

    async def close(self):
        if self.session is not None:
            await self.session.close()

    async def _grade(self) -> float:
        listed = await self.session.run(["find", ".", "-type", "f"])
        paths = sorted(listed.output.splitlines())[:MAX_FILES]
        tests = files_of(self.folder / "tests", prefix="tests/")
        pool = SessionPool(self.limits, num_warm=0)
        result = await pool.grade(self.session, paths, tests, ["bash", "tests/test.sh"])
        return float(result.exit_code == 0)


def limits_of(folder: Path) -> SessionLimits:
    file = folder / "task.toml"
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        wall_s = float(settings.get("verifier", {}).get("timeout_sec", 60))
        machine = settings.get("environment", {})
        memory_mb, disk_mb = machine.get("memory_mb", 512), machine.get("storage_mb", 64)
        return SessionLimits(wall_s=wall_s, cpu_s=wall_s, memory_mb=memory_mb, disk_mb=disk_mb)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise EnvError(
            f"{file}: {error}; see examples/terminal/terminal.py for its keys"
        ) from error


def files_of(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """Path inside of `folder` -> content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {prefix + path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
