"""Looks an import path up without running any code: does `package.module.name` exist?

`areal check` uses it, because really importing a user's reward or workflow may load torch and take
seconds. Modules are found on disk, and the name is looked for in the module's source.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def check_import_path(path: str) -> None:
    """ValueError that says which part of `path` is missing; silent when all seems there."""
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{path!r} is not an import path like package.module.name")
    spec = _find_module(module)
    tree = _parse(spec)
    if tree is None:
        return
    names = set(_defined_names(tree))
    if name in names or names & {"*", "__getattr__"} or _is_submodule(spec, name):
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {module}.{near[0]}?" if near else ""
    raise ValueError(f"module {module!r} ({spec.origin}) defines no {name!r}{hint}")


def find_definition(path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """The definition that `path` names, where its module itself has it, once and undecorated."""
    module, _, name = path.rpartition(".")
    tree = _parse(_find_module(module))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in (tree.body if tree else []) if getattr(node, "name", None) == name]
    if len(found) == 1 and isinstance(found[0], kinds) and not found[0].decorator_list:
        return found[0]
    return None


def _parse(spec: ModuleSpec) -> ast.Module | None:
    """None for a compiled module or a namespace package: only importing it could tell."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ValueError(f"{spec.origin}:{error.lineno}: {error.msg}") from None


def _find_module(module: str) -> ModuleSpec:
    """The spec of `module`; its parents are walked through on disk instead of imported."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    found = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        found = f"{found}.{part}"
        # By its last part: a folder without __init__.py would look for its parent's import.
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    if spec is None or found != module:
        raise ValueError(f"there is no module {module!r} (looked for {found!r} on the Python path)")
    return spec


def _is_submodule(spec: ModuleSpec, name: str) -> bool:
    locations = spec.submodule_search_locations
    return bool(locations) and PathFinder.find_spec(name, locations) is not None


def _defined_names(tree: ast.AST) -> Iterator[str]:
    """Names a module binds at its top level, also inside `if` and `try`; `*` for a star import."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0]
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case _:
                yield from _defined_names(node)
