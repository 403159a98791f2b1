"""Weights published as handles of device memory: refused when wrong, equal when right."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from areal.utils.manifest import seal
from areal.weight_sync.cuda_ipc import FORMAT, HANDLES, open_handles, publish_handles
from areal.weight_sync.publication import PublicationError

SENDER = """
import sys, torch
from areal.weight_sync.cuda_ipc import publish_handles
torch.manual_seed(0)
whole = torch.randn(600, 32).cuda()
named = {"a": whole[:200], "b": whole[200:].bfloat16(), "c": torch.randn(7).cuda().half()}
publish_handles(named.items(), sys.argv[1], 3)
print("published", flush=True)
for line in sys.stdin:
    if line.strip() == "change":
        whole[5, 5] += 1
        torch.cuda.synchronize()
        print("changed", flush=True)
"""


def test_weights_on_the_cpu_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the weight a lies on the CPU"):
        publish_handles([("a", torch.zeros(3))], tmp_path / "w", 1)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"{", "cannot be read"),
        (seal({"version": 3}, ""), "KeyError"),
        (
            seal({"format": FORMAT, "version": 3, "tensors": {}}, "another key"),
            "written with a key",
        ),
        (seal({"format": FORMAT, "version": 2, "tensors": {}}, ""), "expected"),
    ],
)
def test_a_file_that_is_not_the_versions_is_refused(tmp_path, content, fault):
    (tmp_path / HANDLES).write_bytes(content)
    with pytest.raises(PublicationError, match=fault):
        open_handles(tmp_path, version=3)


@pytest.mark.gpu
def test_another_process_reads_them_where_they_lie(tmp_path):
    folder = tmp_path / "weight_update_v3"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, str(folder)], stdin=pipe, stdout=pipe, text=True
    ) as sender:
        assert sender.stdout.readline() == "published\n"
        torch.manual_seed(0)
        whole = torch.randn(600, 32)
        found = dict(open_handles(folder, version=3))
        assert torch.equal(found["a"].cpu(), whole[:200])
        assert torch.equal(found["b"].cpu(), whole[200:].bfloat16())
        with pytest.raises(PublicationError, match="version 3, expected"):
            open_handles(folder, version=4)
        sender.stdin.write("change\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == "changed\n"
        assert float(found["a"][5, 5]) == pytest.approx(float(whole[5, 5]) + 1)
        with pytest.raises(PublicationError, match="the weight a is not what was published"):
            open_handles(folder, version=3)
        del found
        sender.stdin.close()
