"""`areal check config.yaml key=value...`: all checks that are possible before a run starts.

`load_expr_config` checks keys, types and combinations; added here is the environment: models and
data on disk, names and import paths, trackers, the run's folder. It does not load torch, run user
code or write files. Models that are not in the cache are looked up on the hub, for a few seconds:
`cached`, `reachable` and `unknown` (no answer) are ok, a refusal is not. `--trial` goes further:
see trainer/preflight.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
    from areal.api.config.run import DatasetConfig
    from areal.utils.hub import Found
    from areal.utils.import_path import Call

_HUB_DEADLINE_S = 5.0
_ONLINE = ""  # in place of a workflow: clients run the episodes
_MEMORY_TOLERANCE = 1.05  # predictions are this exact; what may fit is not refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks keys, values, names, paths and import paths of a config. Exit code 0 "
        "and a line that begins with 'ok', or 2 and one line that says what to change."
    )
    parser.add_argument("file", nargs="?", metavar="config.yaml", help="the file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as actor.optimizer.lr=1e-5"
    )
    parser.add_argument("--config", metavar="FILE", help="the file, as an option")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="refuse what cannot fit on it: h200, h100, a100, or the file of a profile; default: "
        "this machine's GPU, if it is a known one",
    )
    parser.add_argument(
        "--trial",
        action="store_true",
        help="load data and tokenizer and run one episode against a stub model, in seconds",
    )


def run(args: argparse.Namespace) -> int:
    from areal.api.cli_args import load_experiment

    # With --config the first positional is an override; the loader distinguishes them.
    argv = [*(["--config", args.config] if args.config else []), args.file, *args.overrides]
    argv = [arg for arg in argv if arg is not None]
    config, path = load_experiment(argv)
    found = check_environment(config, deadline_s=_HUB_DEADLINE_S)
    check_memory(config, found, args.device)
    if args.trial:
        from areal.trainer.experiment import try_experiment

        try_experiment(config, print)
    print(f"ok: {path}: {_summary(config, found)}")
    return 0


def check_environment(
    config: BaseExperimentConfig, *, deadline_s: float | None = None
) -> dict[str, Found]:
    """ValueError with the key of the first thing missing on this machine.

    Returns the lookup of each role's model; hubs are queried only with a deadline.
    """
    from areal.api.config.inference_servers import NativeServerConfig
    from areal.cli.model_folders import check_chat_template, check_models
    from areal.utils.server_envs import find_interpreter
    from areal.workflow import WORKFLOWS

    found = check_models(config, deadline_s=deadline_s)
    check_names(config)
    if _is_ppo(config):
        tokenizer, server = found["tokenizer"].folder, config.server
        if not isinstance(server, NativeServerConfig) and not config.rollout.api_url:
            find_interpreter(config.rollout.engine, server.python)
        if config.workflow in WORKFLOWS and tokenizer is not None:
            check_chat_template(config.tokenizer_path, tokenizer)
        _check_agents_see(config, found["actor"])
        _check_address(config.rollout.agent.host, config.rollout.agent.port)
    check_fileroot("cluster.fileroot", config.cluster.fileroot)
    return found


def check_memory(
    config: BaseExperimentConfig, found: Mapping[str, Found], device: str | None
) -> None:
    """ValueError if the run is predicted to need clearly more memory than its devices have.

    Only where the device and all models are known.
    """
    from areal.planner.devices import find_device, load_device, num_gpus
    from areal.planner.offline import offline_load, plan_offline
    from areal.planner.plan import plan_setup, refusal, setup_of
    from areal.planner.scale import known_models
    from areal.planner.shapes import UnplannableError
    from areal.planner.workload import workload_of
    from areal.utils.hub import hub_name
    from areal.utils.model_files import read_hf_config

    name = device or find_device()
    if name is None:
        return
    models, known = config.all_models(), {}
    for role, section in models.items():
        place, repo = found[role], hub_name(section.path or models["actor"].path or "")
        own = read_hf_config(place.folder) if place.folder is not None else place.config
        known[role] = own or (repo and known_models().get(repo.repo))
    if not all(known.values()):
        return
    profile = load_device(name)
    # On a machine with one GPU, all share it.
    shared = device is None and num_gpus() == 1 and not config.scheduler.by_ray
    try:
        if _is_ppo(config):
            load, _ = workload_of(config, {})
            setup = setup_of(config, known, profile)
            memory = plan_setup(setup, load, gpus=1 if shared else None).memory
        else:
            memory = plan_offline(config, known, profile, offline_load(config, {})[0]).memory
    except UnplannableError:
        return
    why = refusal(memory, profile, _MEMORY_TOLERANCE)
    if why is not None:
        raise ValueError(why)


def check_names(config: BaseExperimentConfig) -> None:
    """The checks of `check_environment` without models: data sets, import paths, trackers."""
    _check_dataset("train_dataset", config.train_dataset)
    _check_rows(config.train_dataset)
    if config.valid_dataset is not None:
        _check_dataset("valid_dataset", config.valid_dataset)
    if _is_ppo(config):
        _check_import_paths(config)
        _check_images(config)
    _check_trackers(config)
    if config.scheduler.by_ray and importlib.util.find_spec("ray") is None:
        raise ValueError("scheduler.type: ray is not installed: pip install 'areal[ray]'")


def _is_ppo(config: BaseExperimentConfig) -> TypeGuard[PPOConfig]:
    from areal.api.config.experiment import PPOConfig

    return isinstance(config, PPOConfig)


def _check_dataset(section: str, dataset: DatasetConfig) -> None:
    """As in `areal.dataset`: a loader by name, by the last part of the path, or by import path."""
    from areal.dataset import LOADERS, loader_name

    path, loader = dataset.path, dataset.dataset_kwargs.get("loader")
    if path.startswith((".", os.sep)) and not Path(path).exists():
        raise ValueError(f"{section}.path: {path!r} does not exist")
    if dataset.prompt is not None:
        return _check_columns(section, dataset)
    name = loader or loader_name(path)
    known = sorted(name for name, row_type in LOADERS if row_type == dataset.type)
    if loader is None and name not in known and ("/" in path or Path(path).exists()):
        raise ValueError(
            f"{section}.path: no loader is known for {path!r}; set {section}.dataset_kwargs.loader "
            f"to {', '.join(known)} or an import path"
        )
    _check_name(f"{section}.dataset_kwargs.loader" if loader else f"{section}.path", name, known)


def _check_columns(section: str, dataset: DatasetConfig) -> None:
    """The first row of a text file has the columns of the section."""
    from areal.dataset.source_files import first_row

    row = first_row(Path(dataset.path), dataset.split)
    for key, column in dataset.columns.items():
        if row is not None and column not in row:
            raise ValueError(
                f"{section}.{key}: {dataset.path} has no column {column!r}; found {', '.join(row)}"
            )


def _check_rows(dataset: DatasetConfig) -> None:
    """A local JSON-lines data set fills at least one batch. Others are not read here."""
    path = Path(dataset.path)
    file = path / f"{dataset.split}.jsonl" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".jsonl":
        return
    with file.open("rb") as lines:
        rows = sum(1 for _ in itertools.islice(lines, dataset.batch_size))
    if rows < dataset.batch_size:
        raise ValueError(
            f"train_dataset.batch_size: {dataset.batch_size} is more than the {rows} rows of {file}"
        )


def _check_import_paths(config: PPOConfig) -> None:
    from areal.agents.preconditions import check_agent_options
    from areal.algorithm import (
        DYNAMIC_FILTERS,
        LAMBDA_FUNCTIONS,
        POLICY_LOSSES,
        filter_call,
        lambda_call,
        policy_loss_call,
    )
    from areal.cli.static_import import has_blocking_run
    from areal.environments.hubs.catalog import check_env
    from areal.reward import REWARD_CALL, REWARD_FNS
    from areal.workflow import WORKFLOWS

    actor = config.actor
    for key in ("workflow", "eval_workflow"):
        name = getattr(config, key)
        if name is not None:
            _check_name(key, name, WORKFLOWS)
        if name is not None and name not in WORKFLOWS and has_blocking_run(name):
            raise ValueError(
                f"{key}: {name}.run is a plain `def`; an agent has `async def run(self, data, "
                "**kwargs)`, which awaits its calls of the model; what blocks goes into "
                "asyncio.to_thread"
            )
    call = None  # a user's workflow may call it in any way
    if config.workflow in WORKFLOWS and config.workflow != "env":
        finds_messages = "data_extract_prompt_fn" not in config.workflow_kwargs
        call = replace(REWARD_CALL, certain=["messages"] if finds_messages else [])
    _check_name("reward_fn", config.reward_fn, REWARD_FNS, call)
    if config.env is not None and not check_env(config.env):
        _check_name("env", config.env, ())
    if config.dynamic_filter_fn is not None:
        _check_name("dynamic_filter_fn", config.dynamic_filter_fn, DYNAMIC_FILTERS, filter_call())
    if isinstance(actor.gae_lambda, str):
        call = lambda_call(actor.gae_lambda_kwargs)
        _check_name("actor.gae_lambda", actor.gae_lambda, LAMBDA_FUNCTIONS, call)
    if actor.policy_loss is not None:
        call = policy_loss_call(actor.policy_loss_kwargs)
        _check_name("actor.policy_loss", actor.policy_loss, POLICY_LOSSES, call)
    for name in ("data_extract_prompt_fn", "get_input_ids_fn"):
        if config.workflow in WORKFLOWS and isinstance(config.workflow_kwargs.get(name), str):
            _check_name(f"workflow_kwargs.{name}", config.workflow_kwargs[name], ())
    if config.rollout.agent.prefix_matcher is not None:
        _check_name("rollout.agent.prefix_matcher", config.rollout.agent.prefix_matcher, ())
    check_agent_options(config.rollout.agent)


def _check_images(config: PPOConfig) -> None:
    """Of shipped workflows, one reads images. Rows of other loaders are checked when loaded."""
    from areal.engine.train.fit import VISION_WORKFLOWS
    from areal.workflow import WORKFLOWS
    from areal.workflow.resolve import image_refusal

    texts = {*WORKFLOWS, *WORKFLOWS.values()} - VISION_WORKFLOWS
    if "data_extract_prompt_fn" in config.workflow_kwargs:
        return
    for section, (dataset, workflow) in _image_rows(config).items():
        if workflow in texts:
            raise ValueError(image_refusal(section, dataset, workflow))


def _check_agents_see(config: PPOConfig, model: Found) -> None:
    """Agents of a model that reads text get no rows with images."""
    from areal.cli.static_import import is_agent
    from areal.models import vision_args
    from areal.utils.model_files import read_hf_config
    from areal.workflow import WORKFLOWS
    from areal.workflow.resolve import agent_image_refusal

    hf_config = model.config if model.folder is None else read_hf_config(model.folder)
    if hf_config is None or vision_args(hf_config) is not None:
        return
    for section, (dataset, workflow) in _image_rows(config).items():
        if workflow == _ONLINE or (workflow not in WORKFLOWS and is_agent(workflow)):
            raise ValueError(agent_image_refusal(section, dataset, config.actor.path))


def _image_rows(config: PPOConfig) -> dict[str, tuple[DatasetConfig, str]]:
    """Sections of data sets that are known to have images, and the workflow that gets them."""
    from areal.dataset import IMAGE_DATASETS, loader_name

    online = config.rollout.agent.mode == "online"
    workflows = {
        "train_dataset": _ONLINE if online else config.workflow,
        "valid_dataset": config.eval_workflow or config.workflow,
    }
    found: dict[str, tuple[DatasetConfig, str]] = {}
    for section, workflow in workflows.items():
        dataset = getattr(config, section)
        if dataset is None or dataset.prompt is not None:
            continue
        loader = dataset.dataset_kwargs.get("loader") or loader_name(dataset.path)
        if loader in IMAGE_DATASETS:
            found[section] = dataset, workflow
    return found


def _check_name(key: str, name: str, known: Iterable[str], call: Call | None = None) -> None:
    """`name` is in `known`, or an import path whose module and name exist and which, if it is a
    function, accepts `call`."""
    import difflib

    from areal.cli.static_import import check_import_path, static_signature

    known = sorted(known)
    if name in known:
        return
    if "." not in name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        choices = f"one of {', '.join(known)}, or " if known else ""
        raise ValueError(
            f"{key}: unknown name {name!r}{hint}; expected {choices}an import path "
            "'package.module.name'"
        )
    try:
        check_import_path(name)
        signature = None if call is None else static_signature(name)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if call is not None:
        call.require(signature, f"{key}: {name}")


def _check_address(host: str, port: int) -> None:
    """The server for agents can listen there."""
    from areal.utils.addresses import bind

    try:
        bind(host, port).close()
    except OSError as error:
        raise ValueError(f"rollout.agent.host, rollout.agent.port: {error.strerror}") from None


def _check_trackers(config: BaseExperimentConfig) -> None:
    trackers = config.stats_logger
    wanted = {
        "tensorboard": trackers.tensorboard.path is not None,
        "wandb": trackers.wandb.mode != "disabled",
        "swanlab": trackers.swanlab.mode != "disabled",
        "trackio": trackers.trackio.mode != "disabled",
    }
    for package, used in wanted.items():
        if used and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"stats_logger.{package} is on but the package is missing: pip install {package}"
            )


def check_fileroot(key: str, fileroot: str) -> None:
    """The run's folder can be created: its nearest existing parent is writable."""
    folder = Path(fileroot).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{key}: {str(folder)!r} is a file, expected a folder")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{key}: no permission to write in {str(folder)!r}")


def _summary(config: BaseExperimentConfig, found: Mapping[str, Found]) -> str:
    from areal.run.fingerprint import trainer_name
    from areal.run.model_paths import actor_section

    run = Path(config.cluster.fileroot) / config.experiment_name / config.trial_name
    data, actor = config.train_dataset, actor_section(config)
    trainer = trainer_name(config)
    parts = [f"{trainer} of {actor.path}{_state(found['actor'])} on {data.path}"]
    if _is_ppo(config):
        parts.append(f"{data.batch_size} prompts x {config.gconfig.n_samples} samples a step")
        parts.append(f"staleness at most {config.rollout.max_head_offpolicyness}")
        parts.append(f"{config.rollout.backend} + {actor.backend}")
    else:
        things = "pairs" if trainer in ("rw", "dpo") else "rows"
        parts.append(f"{data.batch_size} {things} a step")
        parts.append(actor.backend)
    others = [
        f"{role} {section.path}{_state(found[role])}"
        for role, section in config.all_models().items()
    ][1:]
    parts += [f"with {' and '.join(others)}"] if others else []
    parts.append(f"run folder {run}")
    parts.append(_processes(config))
    return ", ".join(parts)


def _state(found: Found) -> str:
    """For a hub name: cached, reachable or unknown."""
    if found.state == "local":
        return ""
    return f" ({found.state}{': ' if found.why else ''}{found.why})"


def _processes(config: BaseExperimentConfig) -> str:
    """Number of processes by role, and the scheduler that starts them."""
    from areal.infra.jobs import num_processes

    workers = {role: count for role, count in num_processes(config).items() if count}
    if _is_ppo(config) and config.actor.weight_update_mode != "direct":
        rollout = config.rollout
        if not rollout.api_url:
            workers["inference"] = rollout.num_servers * rollout.ranks_per_server
    each = "".join(f" + {count} {role}" for role, count in workers.items())
    total = 1 + sum(workers.values())
    return (
        f"{total} process{'es' if total > 1 else ''} (controller{each}) by {config.scheduler.type}"
    )
