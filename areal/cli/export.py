"""`areal export RUN`: a run's episodes as files that other programs read."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.agents.episode_log import Episode
    from areal.run.paths import RunPaths

FORMATS = ("trace", "sft", "pairs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the episodes that a run's agents had, as JSON lines. The run keeps them if "
        "rollout.dump_to_file is true; it may be alive."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run, with its logs")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="trace",
        help="trace: OpenEnv's TrainingTrace, an episode per line (default); sft: chats with the "
        "replies to learn; pairs: two replies to one chat, of the best and the worst episode",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="replaced if it is there")
    for bound in ("min", "max"):
        parser.add_argument(
            f"--{bound}-reward", type=float, metavar="R", help="leave out episodes beyond it"
        )


def run(args: argparse.Namespace) -> int:
    from areal.agents.episode_log import read_episodes
    from areal.agents.export import FORMATS
    from areal.api.json_text import dumps
    from areal.run.paths import RunPaths
    from areal.utils.fs import atomic_write_text

    paths = RunPaths(Path(args.folder))
    episodes = read_episodes(paths.logs)
    if not episodes:
        raise ValueError(_nothing_kept(paths))
    least = -math.inf if args.min_reward is None else args.min_reward
    most = math.inf if args.max_reward is None else args.max_reward
    kept = [one for one in episodes if least <= one.reward <= most]
    lines = [dumps(line) for line in FORMATS[args.format](kept)]
    if not lines:
        raise ValueError(_nothing_left(args, episodes, kept))
    atomic_write_text(Path(args.out), "".join(f"{line}\n" for line in lines))
    print(f"{args.out}: {len(lines):,} lines of {len(kept):,} of {len(episodes):,} episodes")
    return 0


def _nothing_kept(paths: RunPaths) -> str:
    if not paths.config.is_file():
        return f"{paths.root} is not the folder of a run: it has no {paths.config.name}"
    return (
        f"{paths.root} has no episodes of agents: set rollout.dump_to_file=true, so that a run "
        "keeps them (only agents' episodes are kept, with their messages; evaluations are not)"
    )


def _nothing_left(args: argparse.Namespace, episodes: list[Episode], kept: list[Episode]) -> str:
    rewards = [one.reward for one in episodes]
    found = f"{len(episodes)} episodes with rewards from {min(rewards):g} to {max(rewards):g}"
    if not kept:
        return f"--min-reward, --max-reward: no episode is left of {found}"
    if args.format == "pairs":
        return (
            "--format pairs needs two episodes of one prompt with different rewards, and replies "
            "to the same chat that were not cut off by max_new_tokens; found "
            f"{found} (gconfig.n_samples sets how many a prompt has)"
        )
    return (
        "--format sft needs chats with a reply that was not cut off by gconfig.max_new_tokens; "
        f"found {found}"
    )
