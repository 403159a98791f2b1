"""The files of examples/cluster: fields their tools read, and commands that areal accepts."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.cli.main import _parse
from areal.cli.train import load_config
from areal.infra.jobs import num_processes, server_job

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "cluster"
GSM8K = ROOT / "examples" / "math" / "gsm8k_grpo.yaml"

# What the tool's own reference says of the fields we use: a type, a dict of fields (all of them
# required, no other known), or a list whose items are alike.
CONTAINER = {
    "name": str,
    "image": str,
    "resources": {"requests": dict, "limits": dict},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {"spec": {"containers": [CONTAINER], "volumes": [dict]}}
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "backoffLimit": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": str},
            "headGroupSpec": {"rayStartParams": dict, "template": POD},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": dict,
                    "template": POD,
                }
            ],
        },
    },
}
SKY_TASK = {
    "name": str,
    "num_nodes": int,
    "resources": {"accelerators": str},
    "workdir": str,
    "volumes": dict,
    "envs": dict,
    "secrets": dict,
    "setup": str,
    "run": str,
}


def faults(value: Any, shape: Any, place: str = "") -> list[str]:
    if isinstance(shape, type):
        good = type(value) is shape
        return [] if good else [f"{place}: expected {shape.__name__}, got {value!r}"]
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return [f"{place}: expected a list, got {value!r}"]
        return [f for i, item in enumerate(value) for f in faults(item, shape[0], f"{place}[{i}]")]
    if not isinstance(value, dict):
        return [f"{place}: expected fields, got {value!r}"]
    odd = sorted(value.keys() ^ shape.keys())
    found = [f"{place}.{key}: unknown or missing" for key in odd]
    for key in sorted(value.keys() & shape.keys()):
        found += faults(value[key], shape[key], f"{place}.{key}")
    return found


@pytest.mark.parametrize(
    "value, fault",
    [
        ({"a": 1, "b": ["x"]}, None),
        ({"a": "1", "b": ["x"]}, ".a: expected int"),
        ({"a": True, "b": ["x"]}, ".a: expected int"),
        ({"a": 1, "b": []}, ".b: expected a list"),
        ({"a": 1}, ".b: unknown or missing"),
        ({"a": 1, "b": ["x"], "c": 0}, ".c: unknown or missing"),
    ],
)
def test_the_check_itself(value, fault):
    found = faults(value, {"a": int, "b": [str]})
    assert found == [] if fault is None else found[0].startswith(fault)


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def launched(words: list[str]) -> Any:
    """The config of an `areal launch ray` command, with the file of this checkout."""
    assert words[0] == "areal"
    args = _parse(words[1:])
    assert args.config.endswith("gsm8k_grpo.yaml")
    return load_config([str(GSM8K), *args.overrides, "scheduler.type=ray"])


def num_gpus(config: Any) -> int:
    job = server_job(config)
    servers = sum(job.num_gpus_of(index, has_gpus=True) for index in range(job.replicas))
    return num_processes(config)["actor"] + servers


def test_kuberay():
    job = read("kuberay.yaml")
    assert faults(job, RAY_JOB) == []
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token"
    (workers,) = cluster["workerGroupSpecs"]
    config = launched(shlex.split(job["spec"]["entrypoint"]))
    assert config.cluster.n_nodes == 1 + workers["replicas"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * config.cluster.n_nodes
    assert num_gpus(config) == gpus
    assert_mounted(config.cluster.fileroot, cluster["headGroupSpec"], workers)


def assert_mounted(path: str, *groups: dict[str, Any]) -> None:
    for group in groups:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {m["mountPath"]: m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
        assert set(mounts.values()) <= volumes
        assert any(Path(path).is_relative_to(mount) for mount in mounts)


def test_skypilot():
    task = read("skypilot.yaml")
    assert faults(task, SKY_TASK) == []
    assert task["envs"]["RAY_AUTH_MODE"] == "token"
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}  # required, and not in the file
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    command = re.search(r"^areal launch .*", task["run"].replace("\\\n", " "), re.MULTILINE)[0]
    filled = command.replace("$SKYPILOT_NUM_NODES", str(task["num_nodes"]))
    config = launched(shlex.split(filled))
    assert config.cluster.n_nodes == task["num_nodes"]
    assert num_gpus(config) == 8 * task["num_nodes"]
    assert any(Path(config.cluster.fileroot).is_relative_to(mount) for mount in task["volumes"])
