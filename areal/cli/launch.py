"""`areal launch local|ray|slurm config.yaml key=value...`: the same run on other machines.

    local   this process, with ranks on this machine
    ray     this process as the controller, ranks on a Ray cluster (RAY_ADDRESS, --address)
    slurm   submits a job; inside it `areal launch ray` runs on a new cluster

Overrides the file's `scheduler.type`. The config is checked here, before anything starts. With
`--script train.py` that script runs in place of the file's trainer, with the file and the overrides
as its arguments; it reads them itself, so only the keys that all trainers share are checked here.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs the experiment of a YAML file on the machines you choose. Options come before the "
        "file."
    )
    targets = parser.add_subparsers(metavar="WHERE", required=True, title="where")
    _add_local(targets)
    _add_ray(targets)
    _add_slurm(targets)


def _add_local(targets: Any) -> None:
    parser = targets.add_parser(
        "local", help="on this machine", description="Trains on this machine, as `areal train`."
    )
    _finish(parser, launch_local)


def _add_ray(targets: Any) -> None:
    parser = targets.add_parser(
        "ray",
        help="on a Ray cluster",
        description="Trains on a Ray cluster: that of --address or RAY_ADDRESS, once it has "
        "cluster.n_nodes machines, else one that is started on this machine's loopback device.",
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="default: $RAY_ADDRESS")
    _add_join_timeout(parser)
    _finish(parser, launch_ray)


def _add_slurm(targets: Any) -> None:
    parser = targets.add_parser(
        "slurm",
        help="as a Slurm job",
        description="Submits one sbatch script that starts Ray on every machine of the job and "
        "trains on its first; prints the job's id. The script is kept in the run's logs.",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="sets cluster.n_nodes")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="sets cluster.n_gpus_per_node"
    )
    parser.add_argument(
        "--cpus-per-node", type=int, metavar="N", help="default: whole machines (--exclusive)"
    )
    parser.add_argument(
        "--time", metavar="LIMIT", help="time limit in sbatch's format: 8:00:00, 2-00"
    )
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option of sbatch, as often as needed: --sbatch=--qos=high",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    _add_join_timeout(parser)
    _finish(parser, launch_slurm)


def _add_join_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--join-timeout",
        type=int,
        default=600,
        metavar="SECONDS",
        help="how long to wait for the machines of the cluster",
    )


def _finish(parser: argparse.ArgumentParser, launch: Any) -> None:
    parser.add_argument(
        "--script", metavar="FILE.py", help="run this script, not the trainer of the YAML file"
    )
    parser.add_argument("config", help="YAML file, for example examples/math/arithmetic_grpo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override config keys")
    parser.set_defaults(launch=launch)


def run(args: argparse.Namespace) -> int:
    return args.launch(args)


def launch_local(args: argparse.Namespace) -> int:
    from areal.cli.train import train

    argv = [args.config, *args.overrides, "scheduler.type=local"]
    return train(_config(args, argv), supervised=args.as_program, script=_command(args, argv))


def launch_ray(args: argparse.Namespace) -> int:
    from areal.cli.train import train

    argv = [args.config, *args.overrides, "scheduler.type=ray"]
    config = _config(args, argv)
    if args.address is not None:
        os.environ["RAY_ADDRESS"] = args.address

    def join() -> None:
        from areal.infra.launcher.cluster import open_cluster

        # On one machine a script's trainer starts Ray, for the workers that it has.
        if args.script is None or "RAY_ADDRESS" in os.environ or config.cluster.n_nodes > 1:
            open_cluster(config, timeout_s=args.join_timeout)

    script = _command(args, argv)
    return train(config, supervised=args.as_program, prepare=join, script=script)


def launch_slurm(args: argparse.Namespace) -> int:
    from areal.infra.launcher.slurm import submit, write_script
    from areal.run.paths import RunPaths
    from areal.utils.fs import atomic_write_text, private_folder

    overrides = [*args.overrides, *_machine_overrides(args)]
    config = _config(args, [args.config, *overrides, "scheduler.type=ray"])
    job = _slurm_job(args, config, overrides)
    text = write_script(job)
    if args.dry_run:
        print(text, end="")
        return 0
    RunPaths.of(config).make_root()
    private_folder(job.logs)  # Slurm writes its log there, but does not create the folder
    script = job.logs / "slurm.sh"
    atomic_write_text(script, text)
    print(f"submitted job {submit(script)}; its logs: {job.logs}")
    return 0


def _config(args: argparse.Namespace, argv: list[str]) -> Any:
    """The whole config, or with a script what it shares with all others."""
    from areal.api.config.loader import load_shared
    from areal.cli.train import checked_config

    if args.script is None:
        return checked_config(argv)
    if not Path(args.script).is_file():
        raise ValueError(f"--script: {args.script!r} is no file")
    return load_shared(argv)


def _command(args: argparse.Namespace, argv: list[str]) -> list[str] | None:
    """A script and its arguments, written as its users write them."""
    if args.script is None:
        return None
    file = next(word for word in argv if "=" not in word)
    return [args.script, "--config", file, *(word for word in argv if word != file)]


def _machine_overrides(args: argparse.Namespace) -> list[str]:
    given = {"cluster.n_nodes": args.nodes, "cluster.n_gpus_per_node": args.gpus_per_node}
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def _slurm_job(args: argparse.Namespace, config: Any, overrides: list[str]) -> Any:
    from areal.infra.launcher.slurm import SlurmJob
    from areal.run.paths import RunPaths

    return SlurmJob(
        name=f"{config.experiment_name}-{config.trial_name}",
        folder=Path.cwd(),
        logs=RunPaths.of(config).logs.absolute(),
        arguments=(*(("--script", args.script) if args.script else ()), args.config, *overrides),
        num_nodes=config.cluster.n_nodes,
        gpus_per_node=config.cluster.n_gpus_per_node,
        cpus_per_node=args.cpus_per_node,
        time=args.time,
        partition=args.partition,
        account=args.account,
        options=tuple(args.sbatch),
        join_timeout_s=args.join_timeout,
    )
