"""From a config file of AReaL to one that loads here, with a list of what changed and why.

    text, changes = convert(["old.yaml", "workflow=my_package.agent.MyAgent"])

    read       the file and overrides, as the loader does: a duplicate key is an error
    rewrite    what AReaL says in other words (`_REWRITES`)
    prune      keys that do not exist here, with the reason of `areal_keys`
    repair     what the loader rejects: another value where there is one that means the same
               (`_REPAIRS`), else the key is dropped with the loader's reason
    resolve    `${...}` of what was dropped becomes its value

What comes out has been loaded. A file that needs a decision, such as a batch too small for its
minibatches, is the loader's ConfigError. Comments and anchors are not kept.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from areal.api.alloc_mode import AllocationMode, ModelAllocation
from areal.api.config.areal_keys import AT_ROOT, why_dropped
from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.api.config.loader import load_source
from areal.api.config.section import (
    ConfigError,
    explain_unknown,
    field_types,
    item_class,
    section_class,
)
from areal.api.config.source import KeyPath, Source, read_source, with_defaults
from areal.api.config.trainers import EXPERIMENTS

_MAX_REPAIRS = 100
_REFERENCE = re.compile(r"\$\{")


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the list: `dropped actor.attn_impl: the engine chooses its attention kernel`."""

    what: Literal["added", "changed", "dropped"]
    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} {self.key}: {self.why}"


def convert(argv: list[str]) -> tuple[str, list[Change]]:
    """YAML text that loads, and what is different in it. Raises ConfigError."""
    draft = Draft(read_source(argv))
    draft.expand_sections()
    for rewrite in _REWRITES:
        rewrite(draft)
    draft.prune()
    draft.repair()
    return draft.text(), draft.changes


class Draft:
    """The file as it becomes, and the list of changes."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tree: dict[str, Any] = copy.deepcopy(source.tree)
        self.changes: list[Change] = []
        self.trainer = _trainer_of(source)
        self.cls: type[BaseExperimentConfig] = EXPERIMENTS[self.trainer]
        if "trainer" not in self.tree:
            self.tree = {"trainer": self.trainer, **self.tree}
            self.note("added", "trainer", f"{self.trainer}, which AReaL's script chooses")

    def note(self, what: Literal["added", "changed", "dropped"], key: str, why: str) -> None:
        self.changes.append(Change(what, key, " ".join(why.split())))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key, as written."""
        node: Any = self.tree
        for name in key.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return default
            node = cast("Mapping[str, Any]", node)[name]
        return node

    def set(self, key: str, value: Any, why: str) -> None:
        *path, leaf = key.split(".")
        node = self.tree
        for name in path:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        shown = f"{value!r:.60}" if isinstance(value, (dict, list)) else str(value)
        self.note("changed" if leaf in node else "added", key, f"{shown}: {why}")
        node[leaf] = value

    def drop(self, key: str, why: str) -> None:
        path, _, leaf = key.rpartition(".")
        del (self.get(path) if path else self.tree)[leaf]
        self.note("dropped", key, why)

    def expand_sections(self) -> None:
        """`ref: ${actor}` and its like, written out: the two have other keys here."""
        for key, hint in list(_sections(self.cls, self.tree, ())):
            name = ".".join(key)
            value = self.get(name)
            if isinstance(value, str) and (section_class(hint) or item_class(hint)):
                found = self.old_value(name)
                if found is not None:
                    self.set(name, found, f"{value}, written out")

    def prune(self) -> None:
        """Drop unknown keys."""
        for key, section in list(_unknown(self.cls, self.tree, ())):
            name = ".".join(str(part) for part in key if not isinstance(part, int))
            parent: Any = self.tree
            for part in key[:-1]:
                parent = parent[part]
            del parent[key[-1]]
            self.note("dropped", name, self._why_unknown(section, name))

    def _why_unknown(self, section: type, name: str) -> str:
        leaf = name.rpartition(".")[2]
        if leaf in AT_ROOT and section is not self.cls:
            return f"it is written once, as {AT_ROOT[leaf]}"
        why = why_dropped(name)
        if why is not None:
            return why
        advice = explain_unknown(self.cls, section, tuple(name.split(".")))
        return advice.partition(": ")[2]

    def repair(self) -> None:
        """Change or drop what the loader rejects, one key at a time, until it loads."""
        for _ in range(_MAX_REPAIRS):
            self._resolve_references()
            try:
                load_source(Source(self.source.path, self.tree, self.source.positions), self.cls)
                return
            except ConfigError as error:
                self._repair_one(error)
        raise ConfigError(f"{self.source.path}: cannot be converted: too many faults")

    def _repair_one(self, error: ConfigError) -> None:
        name, why = ".".join(error.key), str(error).partition(": ")[2]
        for repair in _REPAIRS:
            applies = fnmatch.fnmatchcase(name, repair.key) and repair.says in why
            if applies and repair.act(self, name, why):
                return
        if not error.key or not self._may_drop(error.key):
            raise error
        self.drop(name, why.removesuffix("; remove it"))

    def _may_drop(self, key: KeyPath) -> bool:
        """Written, and not the reason why the file is there."""
        name = ".".join(key)
        return self.get(name, self) is not self and name not in _KEPT and len(key) > 1

    def _resolve_references(self) -> None:
        """Replace each `${...}` that has no value any more by the one it had."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        now = OmegaConf.create(with_defaults(self.cls, self.tree))
        for parent, part, name in list(_references(self.tree, "")):
            try:
                OmegaConf.select(now, name, throw_on_missing=True)
                continue
            except OmegaConfBaseException:
                text, found = parent[part], self.old_value(name)
            if found is None:
                why = f"{text} has no value: the key it names is not in the file"
                raise self.source.error(tuple(name.split(".")), f"{name}: {why}") from None
            parent[part] = found
            self.note("changed", name, f"{found}: {text} is not there any more")

    def old_value(self, name: str) -> Any:
        """The value of a key of the file as it was, references resolved; None if there is none."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            found = OmegaConf.select(OmegaConf.create(self.source.tree), name)
        except OmegaConfBaseException:
            return None
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found

    def text(self) -> str:
        from omegaconf import OmegaConf

        head = "".join(f"# {line}\n" for line in ("Converted by areal convert.", *self.changes))
        return head + OmegaConf.to_yaml(OmegaConf.create(self.tree))


# Without these there is no run, so a mistake in one is the user's to correct.
_KEPT = ("actor.path", "actor.optimizer", "train_dataset.path", "gconfig.n_samples")


def _trainer_of(source: Source) -> str:
    """By the `trainer` key, the type of the rows, or the sections there are."""
    tree = source.tree
    named = tree.get("trainer")
    if isinstance(named, str) and named in EXPERIMENTS:
        return named
    data, actor = _section(tree, "train_dataset"), _section(tree, "actor")
    row_type = {"rl": "ppo", **{name: name for name in ("sft", "rw", "dpo")}}.get(
        str(data.get("type"))
    )
    if row_type is not None:
        return row_type
    if "rollout" in tree or "gconfig" in tree:
        return "ppo"
    if "actor" not in tree:
        raise ConfigError(f"{source.path}: no section actor: is this a config file of AReaL?")
    if "ref" in tree or "beta" in actor:
        return "dpo"
    return "rw" if actor.get("is_critic") else "sft"


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


def _sections(cls: type, tree: Mapping[str, Any], key: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every known key that is written, with its type."""
    for name, value in tree.items():
        hint = field_types(cls).get(name)
        if hint is None:
            continue
        yield (*key, name), hint
        section = section_class(hint)
        if section is not None and isinstance(value, Mapping):
            yield from _sections(section, cast("Mapping[str, Any]", value), (*key, name))


def _unknown(cls: type, tree: Any, key: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], type]]:
    """Path of every key that `cls` does not have, through lists too."""
    for name, value in tree.items():
        hint = field_types(cls).get(name)
        if hint is None:
            yield (*key, name), cls
        elif isinstance(value, Mapping) and (section := section_class(hint)):
            yield from _unknown(section, value, (*key, name))
        elif isinstance(value, list) and (section := item_class(hint)):
            for index, item in enumerate(cast("list[Any]", value)):
                if isinstance(item, Mapping):
                    yield from _unknown(section, item, (*key, name, index))


def _references(node: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    """Parent, key and OmegaConf name of every text with `${`."""
    is_list = isinstance(node, list)
    items: Any = enumerate(cast("list[Any]", node)) if is_list else node.items()
    for part, value in items:
        child = f"{name}[{part}]" if is_list else f"{name}.{part}" if name else str(part)
        if isinstance(value, str) and _REFERENCE.search(value):
            yield node, part, child
        elif isinstance(value, (dict, list)):
            yield from _references(value, child)


# What AReaL says in other words: functions that change a draft in place.


def _write_defaults(draft: Draft) -> None:
    """Defaults there that are others here."""
    if draft.trainer != "ppo":
        return
    if draft.get("ref") is not None and draft.get("actor.kl_ctl") is None:
        draft.set("actor.kl_ctl", 0.1, "AReaL's default; here it is 0")
    if draft.get("ref") is None and draft.get("actor.kl_ctl") not in (None, 0):
        draft.set("actor.kl_ctl", 0.0, "without ref AReaL has no KL penalty")
    if draft.get("dynamic_bs") is True and draft.get("dynamic_filter_fn") is None:
        why = "AReaL's script passes the filter; this one keeps groups whose rewards differ"
        draft.set("dynamic_filter_fn", "keep_mixed_groups", why)
    if draft.get("reward_fn") is None and draft.get("workflow") is None:
        draft.set("reward_fn", _reward_of(draft), "AReaL's script passes it: check that it fits")


def _reward_of(draft: Draft) -> str:
    name = str(draft.get("train_dataset.path", "")).rstrip("/").rpartition("/")[2]
    shipped = ("geometry3k", "clevr_count_70k", "countdown", "gsm8k")
    return next((one for one in shipped if one in name), "math_verify")


def _allocate(draft: Draft) -> None:
    """`allocation_mode` becomes the `backend` of each section."""
    mode = draft.get("allocation_mode")
    if not isinstance(mode, str) or not mode or _REFERENCE.search(mode):
        return
    # `sglang.d4` is the older spelling, and `+eval` or `+cpu` a part without a model.
    parts = re.sub(r"([a-z]+)\.(?=[dtpce]\d)", r"\1:", mode).split("+")
    engines = "+".join(part for part in parts if part.strip() not in ("eval", "cpu"))
    try:
        sections = AllocationMode.from_str(engines).sections()
    except ValueError as error:
        key = ("allocation_mode",)
        raise draft.source.error(key, f"allocation_mode: {error}") from None
    if draft.get("critic") is not None and "actor" in sections:
        sections.setdefault("critic", sections["actor"])
    written: list[str] = []
    for role, keys in sections.items():
        if role not in field_types(draft.cls):
            draft.note("dropped", "allocation_mode", f"{keys['backend']} is for {role}")
            continue
        for name, value in keys.items():
            if draft.get(f"{role}.{name}") is None:
                draft.set(f"{role}.{name}", value, f"from allocation_mode {mode}")
                written.append(f"{role}.{name}")
    why = f"written as {', '.join(written)}" if written else "every section has its backend"
    draft.drop("allocation_mode", why)


def _rewrite_actor(draft: Draft) -> None:
    for role in ("actor", "critic"):
        if draft.get(f"{role}.archon.attn_type") == "tree":
            draft.set(f"{role}.enable_tree_training", True, "archon.attn_type: tree")
        if draft.get(f"{role}.weight_update_mode") == "awex":
            why = "awex is not supported; the default sends weights through shared memory"
            draft.drop(f"{role}.weight_update_mode", why)
        if draft.get(f"{role}.enable_delta_weight_update") is True:
            draft.set(f"{role}.weight_update_mode", "delta", "enable_delta_weight_update")
        if draft.get(f"{role}.optimizer.type") == "adam_bf16":
            draft.set(f"{role}.optimizer.type", "adam", "its moments are always float32")
    cap, mode = (draft.get(f"actor.behave_imp_weight_{name}") for name in ("cap", "mode"))
    if cap is not None and mode != "disabled" and draft.get("actor.rejection_sampling") is None:
        level, _, action = str(mode or "token_mask").partition("_")
        value = {"level": level, "action": "clamp" if action == "truncate" else "mask"}
        draft.set("actor.rejection_sampling", {**value, "upper": cap}, "behave_imp_weight_cap")


def _rewrite_run(draft: Draft) -> None:
    if draft.get("recover.mode") in ("fault", "resume"):
        draft.set("recover.mode", "on", "a run resumes whenever there is a recover point")
    if draft.get("gconfig.lora_name"):
        draft.drop("gconfig.lora_name", "the run names its adapters itself")
    for role in field_types(draft.cls):
        spec = draft.get(f"{role}.scheduling_spec")
        if isinstance(spec, dict):
            draft.set(f"{role}.scheduling_spec", [spec], "a list of one entry")


def _pass_on_server_options(draft: Draft) -> None:
    """Options of a server that are no keys here go to its command line."""
    if draft.cls is not PPOConfig:
        return
    for server in ("sglang", "vllm"):
        if not isinstance(draft.get(server), dict):
            continue
        section: dict[Any, Any] = draft.get(server)
        known = field_types(cast(type, section_class(field_types(PPOConfig)[server])))
        for name, value in list(section.items()):
            key = f"{server}.{name}"
            if name in known or why_dropped(key) is not None or not str(name).isidentifier():
                continue
            if isinstance(value, str) and _REFERENCE.search(value):
                value = draft.old_value(key)
            if value in (None, False, "", []) or isinstance(value, Mapping):
                draft.drop(key, "AReaL does not pass it to the server either")
                continue
            flag = f"--{str(name).replace('_', '-')}"
            items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
            words = [] if value is True else [str(item) for item in items]
            draft.drop(key, f"written in {server}.extra_args")
            section["extra_args"] = [*section.get("extra_args", []), flag, *words]


_REWRITES = (
    _write_defaults,
    _allocate,
    _rewrite_actor,
    _rewrite_run,
    _pass_on_server_options,
)


# What the loader rejects and has another way to be said. False: this repair does not help.


@dataclass(frozen=True, slots=True)
class _Repair:
    key: str  # pattern of the dotted key at fault
    says: str  # part of the loader's message
    act: Callable[[Draft, str, str], bool]


def _serve_natively(draft: Draft, name: str, why: str) -> bool:
    backend = draft.get("rollout.backend")
    if not isinstance(backend, str) or backend.startswith("native"):
        return False
    layout = ModelAllocation.from_str(backend).parallel
    num_servers = layout.data_parallel_size * layout.pipeline_parallel_size
    tensor = f"t{layout.tensor_parallel_size}" if layout.tensor_parallel_size > 1 else ""
    draft.set("rollout.backend", f"native:d{num_servers}{tensor}", why)
    return True


def _set(key: str, value: Any) -> Callable[[Draft, str, str], bool]:
    def act(draft: Draft, name: str, why: str) -> bool:
        if draft.get(key) == value:
            return False
        draft.set(key, value, why)
        return True

    return act


def _next_weight_update_mode(draft: Draft, name: str, why: str) -> bool:
    modes = ("xccl", "disk", "shm")
    now = draft.get(name)
    following = modes[modes.index(now) + 1 :] if now in modes else modes
    if not following:
        return False
    draft.set(name, following[0], why)
    return True


def _only_data_parallel(draft: Draft, name: str, why: str) -> bool:
    """Adapters, trees and the like on as many ranks, each with the whole model."""
    role = name.partition(".")[0]
    backend = draft.get(f"{role}.backend")
    if not isinstance(backend, str):
        return False
    allocation = ModelAllocation.from_str(backend)
    plain = f"{allocation.backend}:d{allocation.parallel.world_size}"
    return _set(f"{role}.backend", plain)(draft, name, why)


def _drop_section(draft: Draft, name: str, why: str) -> bool:
    role, engine = name.partition(".")[0], re.search(r"the section (\w+) needs", why)
    key = f"{role}.{engine.group(1)}" if engine else ""
    if draft.get(key) is None:
        return False
    draft.drop(key, why)
    return True


_REPAIRS = (
    _Repair("rollout.backend", "cannot run in this version", _serve_natively),
    _Repair("rollout.backend", "must be native", _serve_natively),
    _Repair("actor.backend", "when rollout.backend is", _serve_natively),
    _Repair("*.weight_update_mode", "must be", _next_weight_update_mode),
    _Repair("scheduler.type", "when cluster.n_nodes is", _set("scheduler.type", "ray")),
    _Repair("actor.temperature", "", _set("actor.temperature", "${gconfig.temperature}")),
    _Repair("recover.freq_steps", "must be set", _set("recover.freq_epochs", 1)),
    _Repair("*.use_lora", "cannot be sharded", _only_data_parallel),
    _Repair("*.enable_tree_training", "pipeline stages", _only_data_parallel),
    _Repair("*", "the section ", _drop_section),
)
