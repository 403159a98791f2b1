"""The tree of keys that the dataclasses describe, and what to say about a key outside it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any

# Keys of the original system's files that have one place here, and where that is.
_AT_ROOT = {
    "experiment_name": "experiment_name",
    "trial_name": "trial_name",
    "fileroot": "cluster.fileroot",
    "tokenizer_path": "tokenizer_path",
}
# What a user of other frameworks may try, and the key it is here.
_OTHER_NAMES = {
    "learning_rate": "actor.optimizer.lr",
    "model": "actor.path",
    "model_path": "actor.path",
    "kl_coef": "actor.kl_ctl",
    "staleness": "rollout.max_head_offpolicyness",
    "max_staleness": "rollout.max_head_offpolicyness",
}
# Keys of the original system's files that this version does without, and why.
_ABSENT = {
    "group_size": "groups are normalised by their real sizes; remove it",
    "behave_imp_weight_cap": "use rejection_sampling with action: clamp and upper: CAP",
    "behave_imp_weight_mode": "use rejection_sampling (level, action, metric)",
    "sglang": "only trainer ppo generates, so only its files have servers; remove it",
    "vllm": "only trainer ppo generates, so only its files have servers; remove it",
    "port_count": "workers open no ports for calls; remove it",
    "task_type": "every entry describes a worker; remove it",
    "cmd": "workers are started by the scheduler; remove it",
    "fork": "colocated models share a process, a server has its own; remove it",
    "attn_impl": "the engine chooses its attention kernel; remove it",
    "check_trajectory_format": "every trajectory is checked; remove it",
    "queue_size": "the queue follows max_head_offpolicyness; remove it",
    "pin_memory": "it has no effect; remove it",
    "reasoning_parser": "a reply's thoughts stay in its text; remove it",
    "engine_max_tokens": "use gconfig.max_tokens",
    "message_preprocessors": "use prefix_matcher, or change the messages in the agent",
    "admin_api_key": "it comes from the environment variable AREAL_ADMIN_API_KEY; remove it",
    "set_reward_finish_timeout": "a session ends by POST /rl/end_session; remove it",
    "num_workers": "rows are loaded by the controller itself; remove it",
}


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type of a config class."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def section_class(hint: Any) -> type | None:
    """The dataclass behind a field type, `Section` or `Section | None`; None for a plain value."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def item_class(hint: Any) -> type | None:
    """The dataclass of the items of a field type `list[Section]`; None for any other."""
    if typing.get_origin(hint) is not list:
        return None
    return section_class(typing.get_args(hint)[0])


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key below `cls`, sections included."""
    for name, hint in field_types(cls).items():
        yield prefix + name
        section = section_class(hint)
        if section is not None:
            yield from all_keys(section, f"{prefix}{name}.")


def explain_unknown(root: type, section: type, key: tuple[str, ...]) -> str:
    """`actor.eps_clp: unknown key; did you mean actor.eps_clip?`"""
    prefix, leaf = "".join(f"{part}." for part in key[:-1]), key[-1]
    return f"{prefix}{leaf}: unknown key; {_advice(root, section, prefix, leaf)}"


def _advice(root: type, section: type, prefix: str, leaf: str) -> str:
    siblings = list(field_types(section))
    if leaf in _AT_ROOT and section is not root:
        return f"it is written once, as {_AT_ROOT[leaf]} at the root of the file: remove it here"
    if leaf in _ABSENT:
        return _ABSENT[leaf]
    if near := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.8):
        return f"did you mean {prefix}{near[0]}?"
    keys = list(all_keys(root))
    if _OTHER_NAMES.get(leaf) in keys:
        return f"did you mean {_OTHER_NAMES[leaf]}?"
    if homes := [key for key in keys if key.rpartition(".")[2] == leaf]:
        return f"it belongs at {_nearest_first(homes, prefix)}"
    if near := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return f"did you mean {prefix}{near[0]}?"
    leaves = sorted({key.rpartition(".")[2] for key in keys})
    if near := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        homes = [key for key in keys if key.rpartition(".")[2] == near[0]]
        return f"did you mean {_nearest_first(homes, prefix)}?"
    if homes := [key for key in keys if len(leaf) >= 4 and leaf in key.rpartition(".")[2]]:
        return f"did you mean {_nearest_first(homes, prefix)}?"
    if section is root:
        sections = [name for name, hint in field_types(root).items() if section_class(hint)]
        return f"sections of the file are {', '.join(sections)}"
    return f"keys of {prefix.rstrip('.')} are {', '.join(siblings)}"


def _nearest_first(homes: list[str], prefix: str) -> str:
    """At most three places, those inside the section the user wrote in first."""
    homes = sorted(homes, key=lambda key: (not key.startswith(prefix), key.count(".")))
    return " or ".join(homes[:3])
