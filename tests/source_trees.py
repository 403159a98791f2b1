"""Syntax trees of source files, parsed and walked once for all tests of a process that read them.

To parse areal/ takes seconds of a core, and half a dozen files of tests look at all of it.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Every node of its tree, as `ast.walk` gives them."""
    return tuple(ast.walk(tree_of(file)))
