"""Nothing in areal/ turns bytes or texts into code, but where this file says why it may.

Unpickling, eval, exec, unsafe YAML, remote code and loaders of other packages that unpickle are
looked for in the syntax tree; a new use fails with its place, also one that is only handed on.
Import paths are followed from the user's config only: the modules that speak to a network do not
import the loader.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
from source_trees import nodes_of

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
    "torch.jit.load",
    "torch.hub.load",
    "torch.export.load",
    "torch.package.PackageImporter",
    "np.load",
    "numpy.load",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    # torch's own storage of sharded checkpoints unpickles its index and what is no tensor.
    "dist.checkpoint.FileSystemReader",
    "dist.checkpoint.filesystem.FileSystemReader",
    "dist.checkpoint.load_state_dict",
    "dist.checkpoint.state_dict_loader.load_state_dict",
    "dist.checkpoint.format_utils.dcp_to_torch_save",
    "dist.checkpoint.format_utils.torch_save_to_dcp",
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
# They take torch's own storage unless they are given another.
SHARD_LOADERS = {
    "torch.distributed.checkpoint.load",
    "torch.distributed.checkpoint.state_dict_loader.load",
}
# (file, call) -> why it is no door: who wrote the bytes.
ALLOWED = {
    ("areal/sandbox/worker.py", "pickle.loads"): "from the run, over a socket pair it inherited",
    ("areal/sandbox/worker.py", "runpy.run_path"): "a file of ours, or the user's own script",
    ("areal/sandbox/worker.py", "runpy.run_module"): "likewise, started as a module",
    ("areal/sandbox/session_calls.py", "exec"): "code of a model, inside of its sandbox",
    ("areal/sandbox/session_calls.py", "compile"): "likewise",
    ("areal/sandbox/session_init.py", "exec"): "modules of ours, read beside this one",
    ("areal/sandbox/session_init.py", "marshal.loads"): "from the run, over a socket it inherited",
    ("areal/dashboard/reader.py", "yaml.load"): "by a safe loader",
    ("areal/cli/train.py", "runpy.run_path"): "the user's own script, by its path",
    ("areal/rollout/worker.py", "pickle.loads"): "from the run, which calls it",
    ("areal/rollout/workers.py", "pickle.loads"): "what it has pickled itself",
    ("areal/infra/worker.py", "pickle.loads"): "between a run and its workers, over a socket pair",
    # Ranks of one process group are one program: torch's own transport knows no keys either.
    ("areal/engine/train/fsdp/images.py", "torch.distributed.all_gather_object"): "ranks",
    ("areal/engine/train/megatron/layout.py", "torch.distributed.broadcast_object_list"): "ranks",
    ("areal/engine/train/megatron/weights.py", "torch.distributed.all_gather_object"): "ranks",
    ("areal/engine/train/pipeline.py", "torch.distributed.broadcast_object_list"): "ranks",
    ("areal/engine/train/process_group.py", "torch.distributed.broadcast_object_list"): "ranks",
    ("areal/engine/train/process_group.py", "torch.distributed.all_gather_object"): "ranks",
    ("areal/utils/stats_tracker.py", "torch.distributed.all_gather_object"): "ranks",
}
# What speaks HTTP, on either side. `workflow.py` loads what the config names.
NETWORK = [
    file
    for package in ("engine/native", "engine/remote", "agents", "openai", "openai/parsing")
    for file in (ROOT / "areal" / package).glob("*.py")
    if file.name != "workflow.py"
]


def walk(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What names were before `import ... as ...`."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def spelled(node: ast.expr) -> str:
    """`ast.unparse`, which takes long for a name with dots, the usual case."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{spelled(node.value)}.{node.attr}"
    return ast.unparse(node)


def uses(nodes: tuple[ast.AST, ...]) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that is named: called, derived from or handed on."""
    names = imported_names(nodes)
    found = []
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            first, dot, rest = spelled(node).partition(".")
            found.append((node.lineno, names.get(first, first) + dot + rest))
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def calls(nodes: tuple[ast.AST, ...]) -> list[tuple[int, str, ast.Call]]:
    """(line, dotted name, call)."""
    names = imported_names(nodes)
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            first, dot, rest = spelled(node.func).partition(".")
            found.append((node.lineno, names.get(first, first) + dot + rest, node))
    return found


def faults(nodes: tuple[ast.AST, ...], file: str) -> list[str]:
    out = []
    for line, name in uses(nodes):
        short = name.removeprefix("torch.distributed.")
        is_forbidden = name in FORBIDDEN or (short != name and f"dist.{short}" in FORBIDDEN)
        if is_forbidden and (file, name) not in ALLOWED:
            out.append(f"{file}:{line}: {name}")
    for line, name, call in calls(nodes):
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        if name in SHARD_LOADERS and not _names_own_storage(options.get("storage_reader")):
            out.append(f"{file}:{line}: {name} unpickles without storage_reader=ShardReader")
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


def _names_own_storage(reader: ast.expr | None) -> bool:
    """`ShardReader(...)` in the call itself: what a variable holds is not followed."""
    return isinstance(reader, ast.Call) and ast.unparse(reader.func) == "ShardReader"


def test_nothing_turns_data_into_code():
    found = [
        fault for file in FILES for fault in faults(nodes_of(file), str(file.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


def test_exceptions_are_still_needed():
    used = {
        (str(file.relative_to(ROOT)), name) for file in FILES for _, name in uses(nodes_of(file))
    }
    assert set(ALLOWED) <= used


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "import pickle as p\np.loads(x)",
        "from pickle import loads as f\nf(x)",
        "import torch\ntorch.load(p)",
        "import torch\ntorch.jit.load(p)",
        "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader(p)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(s, checkpoint_id=p)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(s, storage_reader=FileReader(p))",
        "from torch.distributed.checkpoint import load\nload(s)",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import torch.distributed.checkpoint as dcp\nclass Reader(dcp.FileSystemReader): ...",
        "import pickle\nread = pickle.loads",
        "import torch\ntorch.distributed.checkpoint.load(s)",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "import yaml\nyaml.load(x)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "f(trust_remote_code=True)",
        "from transformers import AutoConfig\nAutoConfig.from_pretrained(x)",
    ],
)
def test_the_search_itself(source):
    assert faults(walk(source), "areal/somewhere.py")


def test_network_modules_import_nothing_by_name():
    assert len(NETWORK) > 30
    for file in NETWORK:
        source = file.read_text(encoding="utf-8")
        assert "import_path" not in source and "importlib" not in source, file
