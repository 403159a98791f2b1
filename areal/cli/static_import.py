"""Resolves an import path without running code: does it exist, and with which signature?

`areal check` uses it, because importing a user's reward or workflow may load torch and take
seconds. Modules are found on disk, and the name is searched in the module's source.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def check_import_path(path: str) -> None:
    """ValueError that names the missing part of `path`."""
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{path!r} is not an import path like package.module.name")
    spec = _find_module(module)
    tree = _source_tree(spec)
    if tree is None:
        return  # a compiled module or a namespace package: unknown without importing it
    names = set(_defined_names(tree))
    if name in names or names & {"*", "__getattr__"} or _is_submodule(spec, name):
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {module}.{near[0]}?" if near else ""
    raise ValueError(f"module {module!r} ({spec.origin}) defines no {name!r}{hint}")


def find_definition(
    path: str, *, max_imports: int = 5
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """The definition at `path`. None if the source is not enough: a decorated function, a name that
    is assigned, imported by `*`, or re-exported through more than `max_imports` modules."""
    module, _, name = path.rpartition(".")
    tree = _source_tree(_find_module(module)) if max_imports >= 0 else None
    found = None
    for node in [] if tree is None else tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found = node if node.name == name else found
            case ast.ImportFrom(module=origin, level=0):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin_path = f"{origin}.{alias.name}"
                        return find_definition(origin_path, max_imports=max_imports - 1)
    return None if found is None or found.decorator_list else found


def static_signature(path: str) -> inspect.Signature | None:
    """Signature of the function at `path`; None if the source is not enough. ValueError for a
    coroutine function, because its callers do not await it."""
    found = find_definition(path)
    if isinstance(found, ast.AsyncFunctionDef):
        raise ValueError(f"{path} is `async def`, expected a plain function")
    if not isinstance(found, ast.FunctionDef):
        return None
    return _signature(found.args)


def has_blocking_run(path: str) -> bool:
    """Whether `path` is a class whose `run` is a plain function that uses no coroutine of the
    class. False if the source is not enough."""
    methods = _methods(path)
    coroutines = {name for name, node in methods.items() if isinstance(node, ast.AsyncFunctionDef)}
    run = methods.get("run")
    if "arun_episode" in methods or not isinstance(run, ast.FunctionDef):
        return False
    called = {node.attr for node in ast.walk(run) if isinstance(node, ast.Attribute)}
    return not called & coroutines


def is_agent(path: str) -> bool:
    """Whether `path` is a class with `run` of its own, and no workflow. False if the source is not
    enough."""
    methods = _methods(path)
    return "run" in methods and "arun_episode" not in methods


def _methods(path: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Of the class at `path`, without those of its bases; empty if it is none."""
    found = find_definition(path)
    if not isinstance(found, ast.ClassDef):
        return {}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in found.body if isinstance(node, kinds)}


class _Given:
    """Stands for a default whose value is unknown without running the code."""

    def __repr__(self) -> str:
        return "..."


_GIVEN = _Given()


def _signature(arguments: ast.arguments) -> inspect.Signature:
    kinds, parameters = inspect.Parameter, []
    by_position = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_position) - len(arguments.defaults)
    for place, argument in enumerate(by_position):
        is_named = place >= len(arguments.posonlyargs)
        kind = kinds.POSITIONAL_OR_KEYWORD if is_named else kinds.POSITIONAL_ONLY
        default = kinds.empty if place < num_required else _GIVEN
        parameters.append(kinds(argument.arg, kind, default=default))
    if arguments.vararg is not None:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = kinds.empty if given is None else _GIVEN
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=default))
    if arguments.kwarg is not None:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _source_tree(spec: ModuleSpec) -> ast.Module | None:
    """None for a module without Python source."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ValueError(f"{spec.origin}:{error.lineno}: {error.msg}") from None


def _find_module(module: str) -> ModuleSpec:
    """The spec of `module`; its parents are searched on disk instead of imported."""
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
        # By its last part: for a folder without __init__.py the full name would import the parent.
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
