"""`areal show RUN --prompt ID | --step N | --sample ID/N | --servers`: one story of a run."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells what a run recorded of one prompt, one step or one sample, also while it is alive; "
        "or the state of each of its servers and rollout workers."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run, with its run.db")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--prompt", type=int, metavar="ID", help="its life, and its stored samples")
    which.add_argument("--step", type=int, metavar="N", help="its statistics, prompts and samples")
    which.add_argument(
        "--sample", metavar="ID/N", help="its tokens: prompt ID, sample N of it (counted from 0)"
    )
    which.add_argument("--servers", action="store_true", help="and rollout workers of a living run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    from areal.dashboard import text, views
    from areal.dashboard.members import living_members
    from areal.dashboard.reader import RunReader

    with RunReader(args.folder) as reader:
        if args.servers:
            value = living_members(reader)
            if value["why"]:
                raise ValueError(f"--servers: {value['why']}")
            story = text.members_table(value)
        elif args.prompt is not None:
            story = text.prompt_story(reader, args.prompt)  # raises for an unknown one
            value = views.prompt(reader, args.prompt)
        elif args.step is not None:
            story = text.step_story(reader, args.step)
            value = views.step(reader, args.step)
        else:
            task_id, number = _sample(args.sample)
            story = text.sample_story(reader, task_id, number)
            value = views.sample(reader, task_id, number)
    print(json.dumps(value) if args.json else story)
    return 0


def _sample(text: str) -> tuple[int, int]:
    task_id, _, number = text.partition("/")
    try:
        return int(task_id), int(number or "0")
    except ValueError:
        raise ValueError(
            f"--sample: expected a prompt and its sample such as 12/0, got {text!r}"
        ) from None
