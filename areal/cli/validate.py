"""`areal validate [--cluster HOST:PORT]`: is everything here that areal needs?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.infra.installation import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a line for Python, every package, the device and its kernels, sandboxes, shared "
        "memory and the environments of stock servers, with what to do about what is missing. The "
        "exit code is 1 if something required is missing."
    )
    parser.add_argument(
        "--cluster",
        metavar="HOST:PORT",
        help="also the machines of this Ray cluster: versions, and whether they reach each other",
    )


def run(args: argparse.Namespace) -> int:
    from areal.infra.installation import verdict

    findings: list[Finding] = []
    for finding in _findings(args.cluster):
        print(finding, flush=True)
        findings.append(finding)
    code, text = verdict(findings)
    print(text)
    return code


def _findings(cluster: str | None) -> Iterator[Finding]:
    from areal.infra.installation import validate

    yield from validate()
    if cluster is not None:
        try:
            from areal.infra.cluster_check import check_cluster
        except ImportError:
            raise ValueError("--cluster needs Ray: pip install 'areal[ray]'") from None
        yield from check_cluster(cluster)
