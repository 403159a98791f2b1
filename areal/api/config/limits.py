"""Limits of a process that runs a user's code: a reward function, or an agent in `subproc` mode."""

from __future__ import annotations

from dataclasses import field

from areal.api.config.checks import expand_path, require_above, require_at_least
from areal.api.config.section import config_section

KEYS = [
    *("~/.ssh", "~/.gnupg", "~/.aws", "~/.azure", "~/.config/gcloud", "~/.kube", "~/.docker"),
    *("~/.netrc", "~/.git-credentials", "~/.pypirc", "~/.npmrc", "~/.pgpass", "~/.my.cnf"),
]


@config_section
class ProcessLimits:
    """What the process may use. SECURITY.md says how this is kept, and what is not."""

    memory_gb: float = 8.0
    """Memory of one process, in GiB; more is a MemoryError, or its end."""
    cpu_seconds: float | None = None
    """CPU time of one call over all its threads and processes. Default: four times its time."""
    file_size_mb: int = 1024
    """Largest file it may write, in MiB."""
    disk_mb: int = 4096
    """All it may keep in $TMPDIR, in MiB; more ends the process."""
    max_processes: int = 0
    """Processes it may start besides threads."""
    network: bool = True
    """Whether it may open internet sockets. Unix sockets it may never open."""
    writable: list[str] = field(default_factory=list)
    """Folders it may write in, besides a temporary one of its own ($TMPDIR)."""
    unreadable: list[str] = field(default_factory=lambda: [*KEYS])
    """Files and folders it may not read, besides the run's own folder. Default: where keys lie
    (~/.ssh, ~/.aws, ~/.netrc and their like)."""
    env: list[str] = field(default_factory=list)
    """Environment variables it gets besides PATH, HOME and the like (JUDGE_API_KEY)."""

    def __post_init__(self) -> None:
        require_above(0, memory_gb=self.memory_gb, cpu_seconds=self.cpu_seconds)
        require_at_least(1, file_size_mb=self.file_size_mb, disk_mb=self.disk_mb)
        require_at_least(0, max_processes=self.max_processes)
        self.writable = [expand_path("writable", path) for path in self.writable]
        self.unreadable = [expand_path("unreadable", path) for path in self.unreadable]
