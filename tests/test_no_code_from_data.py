"""Nothing in areal/ turns bytes or texts into code, but where this file says why it may.

Unpickling, eval, exec, unsafe YAML and remote code are looked for in the syntax tree; a new use
fails with its place. Import paths are followed from the user's config only: the modules that speak
to a network do not import the loader.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "areal").rglob("*.py"))

FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cPickle.loads",
    "dill.loads",
    "cloudpickle.loads",
    "marshal.loads",
    "shelve.open",
    "joblib.load",
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.scatter_object_list",
    "dist.gather_object",
    "dist.recv_object_list",
    "multiprocessing.connection.Listener",
    "runpy.run_path",
    "runpy.run_module",
    "os.system",
    "os.popen",
}
# (file, call) -> why it is no door: who wrote the bytes.
ALLOWED = {
    ("areal/api/reward_worker.py", "pickle.loads"): "from the run, over a socket pair it inherited",
    ("areal/api/reward_worker.py", "runpy.run_path"): "a file of ours beside it",
    ("areal/api/reward_confine.py", "runpy.run_path"): "a file of ours beside it",
    ("areal/rollout/worker_process.py", "pickle.loads"): "from the run, over a socket pair",
    ("areal/rollout/workers.py", "pickle.loads"): "what it has pickled itself",
    ("areal/infra/channel.py", "pickle.loads"): "between a run and its ranks, over a socket pair",
    ("areal/infra/engine_host.py", "pickle.loads"): "what it has just pickled, to see if it can",
    # Ranks of one process group are one program: torch's own transport knows no keys either.
    ("areal/engine/megatron/schedule.py", "torch.distributed.broadcast_object_list"): "ranks",
    ("areal/engine/megatron/weights.py", "torch.distributed.all_gather_object"): "ranks",
    ("areal/engine/pipeline.py", "torch.distributed.broadcast_object_list"): "ranks",
    ("areal/engine/process_group.py", "torch.distributed.broadcast_object_list"): "ranks",
    ("areal/engine/process_group.py", "torch.distributed.all_gather_object"): "ranks",
    ("areal/utils/stats_tracker.py", "torch.distributed.all_gather_object"): "ranks",
}
# What speaks HTTP, on either side. `workflow.py` loads what the config names.
NETWORK = [
    file
    for pattern in ("engine/native", "openai", "utils/openai_wire")
    for file in (ROOT / "areal" / pattern).glob("*.py")
    if file.name != "workflow.py"
]
NETWORK += [
    f
    for f in (ROOT / "areal/engine").glob("*.py")
    if {"remote", "http", "server"} & set(f.stem.split("_"))
]


def calls(source: str) -> list[tuple[int, str, ast.Call]]:
    """(line, dotted name, call), with names as they were before `import ... as ...`."""
    tree = ast.parse(source)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            first, dot, rest = ast.unparse(node.func).partition(".")
            found.append((node.lineno, names.get(first, first) + dot + rest, node))
    return found


def faults(source: str, file: str) -> list[str]:
    out = []
    for line, name, call in calls(source):
        short = name.removeprefix("torch.distributed.")
        is_forbidden = name in FORBIDDEN or (short != name and f"dist.{short}" in FORBIDDEN)
        if is_forbidden and (file, name) not in ALLOWED:
            out.append(f"{file}:{line}: {name}")
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        shell = options.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            out.append(f"{file}:{line}: {name} through a shell")
        trust = options.get("trust_remote_code")
        if trust is not None and isinstance(trust, ast.Constant) and trust.value is not False:
            out.append(f"{file}:{line}: {name} trusts remote code without being told to")
        is_hub = "Auto" in name and name.endswith(".from_pretrained")
        if is_hub and trust is None:
            out.append(f"{file}:{line}: {name} must say trust_remote_code, or transformers asks")
    return out


def test_nothing_turns_data_into_code():
    found = [
        fault
        for file in FILES
        for fault in faults(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


def test_exceptions_are_still_needed():
    used = {
        (str(file.relative_to(ROOT)), name)
        for file in FILES
        for _, name, _ in calls(file.read_text(encoding="utf-8"))
    }
    assert set(ALLOWED) <= used


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "import pickle as p\np.loads(x)",
        "from pickle import loads as f\nf(x)",
        "import torch\ntorch.load(p)",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "import yaml\nyaml.load(x)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "f(trust_remote_code=True)",
        "from transformers import AutoConfig\nAutoConfig.from_pretrained(x)",
    ],
)
def test_the_search_itself(source):
    assert faults(source, "areal/somewhere.py")


def test_network_modules_import_nothing_by_name():
    assert len(NETWORK) > 30
    for file in NETWORK:
        source = file.read_text(encoding="utf-8")
        assert "import_path" not in source and "importlib" not in source, file
