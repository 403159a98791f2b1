"""Workers by role: its own, or those of the role it is colocated with.

table.own(job, workers); table.share(job, "actor")
table.find("ref/0")              # the first worker of actor
table.take("actor")              # removes and returns its workers; removes its guests too
"""

from __future__ import annotations

from typing import Generic, TypeVar

from areal.api.scheduler_api import Job, WorkerNotFoundError

W = TypeVar("W")


class RoleTable(Generic[W]):
    """Workers of type W; one of a role has the id `role/index`."""

    def __init__(self) -> None:
        self._workers: dict[str, list[W]] = {}  # by owner role
        self._hosts: dict[str, str] = {}  # colocated role -> the role whose workers it shares

    def own(self, job: Job, workers: list[W]) -> None:
        assert job.role not in self._workers, f"role {job.role} has workers already"
        self._workers[job.role] = workers

    def share(self, job: Job, target: str) -> None:
        assert job.role not in self._workers, f"role {job.role} has workers already"
        workers = self.of(target)
        if len(workers) != job.replicas:
            raise ValueError(
                f"{job.role} has {job.replicas} ranks and cannot share the {len(workers)} "
                f"processes of {target}: give both as many, or {job.role} processes of its own"
            )
        self._hosts[job.role] = target

    def of(self, role: str) -> list[W]:
        host = self._hosts.get(role, role)
        if host not in self._workers:
            raise WorkerNotFoundError(role, f"no such role; known are {list(self._workers)}")
        return self._workers[host]

    def find(self, worker_id: str) -> W:
        role, _, index = worker_id.rpartition("/")
        return self.of(role)[int(index)]

    def put(self, worker_id: str, worker: W) -> None:
        """Replace the worker with this id."""
        role, _, index = worker_id.rpartition("/")
        self.of(role)[int(index)] = worker

    def take(self, role: str | None) -> dict[str, list[W]]:
        """Remove `role`, or all, with its guests; returns the workers. A guest owns none."""
        roles = [role] if role is not None else list(self._workers)
        self._hosts = {
            guest: host for guest, host in self._hosts.items() if not {guest, host} & set(roles)
        }
        return {name: self._workers.pop(name) for name in roles if name in self._workers}
