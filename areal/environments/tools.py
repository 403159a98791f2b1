"""Tools: functions that a model may call, their JSON schemas, and the checks of its calls.

    async def search(query: str, limit: int = 3) -> str:
        '''Search the corpus.'''

    tool = Tool.of(search)            # name, description and schema from the function itself
    await tool.call({"query": "x"})

What the model does wrong (an unknown tool, arguments that do not fit) is told to the model, and so
is a `ToolError` of the function. Any other exception is a failure of the episode.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class ToolError(Exception):
    """The text is the tool's answer to the model: its call could not be carried out."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of an object
    function: Callable[..., Any]  # called with the arguments as keywords

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """From a function with type hints; its docstring is the description."""
        name = getattr(function, "__name__", "")
        hints = typing.get_type_hints(function)
        properties: dict[str, Any] = {}
        required: list[str] = []
        for key, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(f"tool {name}: *{key} has no schema; name the arguments")
            properties[key] = _schema_of(hints.get(key), f"tool {name}: argument {key}")
            if parameter.default is parameter.empty:
                required.append(key)
        schema = {"type": "object", "properties": properties, "required": required}
        return cls(name, inspect.getdoc(function) or "", schema, function)

    @property
    def schema(self) -> dict[str, Any]:
        """In OpenAI's format."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    def check(self, arguments: Any) -> None:
        """ToolError, for the model, if `arguments` do not fit."""
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of {self.name} must be a JSON object")
        properties = self.parameters.get("properties", {})
        for key in self.parameters.get("required", []):
            if key not in arguments:
                raise ToolError(f"{self.name} needs the argument {key!r}")
        for key, value in arguments.items():
            if key not in properties:
                known = ", ".join(properties) or "none"
                raise ToolError(f"{self.name} has no argument {key!r}; it takes {known}")
            wanted = properties[key].get("type") if isinstance(properties[key], dict) else None
            if not _fits(value, wanted):
                raise ToolError(f"{self.name}: the argument {key!r} must be of type {wanted}")


def tools_of(given: Sequence[Any]) -> dict[str, Tool]:
    """Tools by name, of `Tool` objects and functions. ValueError if two share a name."""
    tools = [one if isinstance(one, Tool) else Tool.of(one) for one in given]
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        names = [tool.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two tools are called {twice[0]!r}: rename one, or leave its server out")
    return by_name


async def answer_call(
    tools: Mapping[str, Tool],
    name: str,
    arguments: str,
    run: Callable[[Callable[..., Any], dict[str, Any]], Awaitable[Any]],
) -> str:
    """The text for the model; `arguments` is what it wrote, `run` executes the function."""
    try:
        if name not in tools:
            raise ToolError(f"there is no tool {name!r}; tools are {', '.join(tools)}")
        try:
            values = json.loads(arguments or "{}")
        except ValueError as error:
            raise ToolError(f"the arguments of {name} are not JSON: {error}") from None
        tools[name].check(values)
        result = await run(tools[name].function, values)
    except ToolError as error:
        return f"error: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _schema_of(hint: Any, what: str) -> dict[str, Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # X | None
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        hint = kinds[0] if len(kinds) == 1 else None
    kind = typing.get_origin(hint) or hint
    if kind not in _TYPES:
        expected = ", ".join(known.__name__ for known in _TYPES)
        raise ValueError(f"{what} needs a type hint of {expected}, got {hint!r}")
    return {"type": _TYPES[kind]}


def _fits(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, str) or wanted not in _PYTHON_TYPES or value is None:
        return True
    is_bool = isinstance(value, bool)
    return isinstance(value, _PYTHON_TYPES[wanted]) and is_bool == (wanted == "boolean")
