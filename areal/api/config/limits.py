"""Limits of a process that runs a user's code: a reward function, or an agent in `subproc` mode."""

from __future__ import annotations

from dataclasses import field

from areal.api.config.checks import expand_path, require_above, require_at_least
from areal.api.config.section import config_section


@config_section
class ProcessLimits:
    """What the process may use. The kernel keeps these; SECURITY.md says what they promise."""

    memory_gb: float = 8.0
    """Private memory of one process, in GiB; more is a MemoryError."""
    cpu_seconds: float | None = None
    """CPU time of one call over all its threads. Default: four times its time limit."""
    file_size_mb: int = 1024
    """Largest file it may write, in MiB."""
    max_processes: int = 0
    """Processes it may start besides threads. Above 0 the kernel counts all that the user runs,
    and does not count for root."""
    network: bool = True
    """Whether it may open sockets."""
    writable: list[str] = field(default_factory=list)
    """Folders it may write in, besides a temporary one of its own ($TMPDIR)."""
    env: list[str] = field(default_factory=list)
    """Environment variables that it gets although they look like secrets (JUDGE_API_KEY)."""

    def __post_init__(self) -> None:
        require_above(0, memory_gb=self.memory_gb, cpu_seconds=self.cpu_seconds)
        require_at_least(1, file_size_mb=self.file_size_mb)
        require_at_least(0, max_processes=self.max_processes)
        self.writable = [expand_path("writable", path) for path in self.writable]
