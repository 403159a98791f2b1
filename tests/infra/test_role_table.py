"""Workers of roles, their own or shared, whatever a worker is."""

from __future__ import annotations

import pytest

from areal.api.scheduler_api import Job, WorkerNotFoundError
from areal.infra.scheduler.role_table import RoleTable


def test_a_guest_finds_the_workers_of_its_host_and_goes_with_it():
    table: RoleTable[str] = RoleTable()
    table.own(Job("actor", 2), ["a", "b"])
    table.own(Job("critic", 1), ["c"])
    table.share(Job("ref", 2), "actor")
    assert table.find("ref/1") == table.find("actor/1") == "b"
    assert table.of("critic") == ["c"]
    table.put("actor/1", "d")  # in the place of one that has ended
    assert table.of("ref") == ["a", "d"]
    table.put("actor/1", "b")
    assert table.take("ref") == {}  # it has none of its own
    assert table.find("actor/0") == "a"
    table.share(Job("ref", 2), "actor")
    assert table.take("actor") == {"actor": ["a", "b"]}
    for role in ("actor", "ref"):
        with pytest.raises(WorkerNotFoundError, match=r"no such role; known are \['critic'\]"):
            table.of(role)
    assert table.take(None) == {"critic": ["c"]}


def test_a_guest_has_as_many_ranks_as_its_host():
    table: RoleTable[str] = RoleTable()
    table.own(Job("actor", 2), ["a", "b"])
    with pytest.raises(ValueError, match="ref has 1 ranks and cannot share the 2 processes of act"):
        table.share(Job("ref", 1), "actor")
