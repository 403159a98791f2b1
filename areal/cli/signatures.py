"""Whether rewards and agents that a config names have the right shape, read from their source.

Nothing is imported, so what only running could tell (decorators, generated functions) is let pass;
`areal check --trial` runs it.
"""

from __future__ import annotations

import ast

from areal.cli.static_import import find_definition

REWARD_SHAPE = "fn(prompt, completions, prompt_ids, completion_ids, **data) -> float"
AGENT_SHAPE = "async def run(self, data, **kwargs)"
_NUM_REWARD_ARGUMENTS = 4


def check_reward(key: str, path: str) -> None:
    """A plain function that can be called as the shipped workflows call it."""
    found = find_definition(path)
    if isinstance(found, ast.AsyncFunctionDef):
        raise ValueError(
            f"{key}: {path} is `async def`; a reward runs in a process of its own and must be a "
            f"plain function: {REWARD_SHAPE}"
        )
    if isinstance(found, ast.FunctionDef) and not _takes_a_sample(found.args):
        raise ValueError(
            f"{key}: {path}({ast.unparse(found.args)}) cannot be called as a reward: expected "
            f"{REWARD_SHAPE}, which judges one completion and gets the columns of its row, "
            "`messages` among them, as keywords"
        )


def _takes_a_sample(args: ast.arguments) -> bool:
    positional = [*args.posonlyargs, *args.args]
    enough = len(positional) >= _NUM_REWARD_ARGUMENTS or args.vararg is not None
    keywords = {argument.arg for argument in [*args.args[_NUM_REWARD_ARGUMENTS:], *args.kwonlyargs]}
    return enough and (args.kwarg is not None or "messages" in keywords)


def check_agent(key: str, path: str) -> None:
    """A class whose own `run` is a coroutine, or hands the work to one of its class."""
    found = find_definition(path)
    if not isinstance(found, ast.ClassDef):
        return
    methods = {
        node.name: node
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    coroutines = {name for name, node in methods.items() if isinstance(node, ast.AsyncFunctionDef)}
    run = methods.get("run")
    if "arun_episode" in methods or not isinstance(run, ast.FunctionDef):
        return
    called = {node.attr for node in ast.walk(run) if isinstance(node, ast.Attribute)}
    if not called & coroutines:
        raise ValueError(
            f"{key}: {path}.run is a plain `def`; an agent has `{AGENT_SHAPE}`, which awaits its "
            "calls of the model; what blocks goes into asyncio.to_thread"
        )
