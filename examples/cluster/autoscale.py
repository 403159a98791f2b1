"""Scales the servers of kuberay_servers.yaml by queue depth.

    python autoscale.py RUN --deployment areal-servers --most 8

Every `--look` seconds it asks the run for the requests that run and wait on each of its servers
(`areal serve list RUN --json`) and sets the replicas of the deployment. Its pods join the run when
they start, and leave it, drained, when they are ended. The rule:

    wanted    what serves all requests at `--requests` per server, without the run's own servers
    replicas  the most that was wanted in the last `--calm` looks: grows at once, shrinks late

It runs in a pod of the cluster, whose service account may change the deployment's scale.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 60.0


def wanted_replicas(
    servers: Sequence[Mapping[str, Any]], *, replicas: int, requests: int, least: int, most: int
) -> int:
    """Of the deployment, which has `replicas` now; `servers` are those of the run that answer."""
    serving = [server for server in servers if server["state"] == "serving"]
    load = sum(server.get("running", 0) + server.get("waiting", 0) for server in serving)
    own = max(0, len(serving) - replicas)
    return min(max(math.ceil(load / requests) - own, least), most)


def settled(wanted: Iterable[int]) -> int:
    """The replicas to have, from what the last looks wanted."""
    return max(wanted)


def servers_of(run: str) -> list[dict[str, Any]]:
    """RuntimeError or TimeoutExpired if the run does not answer."""
    command = ["areal", "serve", "list", run, "--json"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if listed.returncode != 0:
        raise RuntimeError(listed.stderr.strip())
    return json.loads(listed.stdout)["servers"]


class Deployment:
    """The scale of a deployment, through the API of Kubernetes."""

    def __init__(self, name: str, api: str, account: Path) -> None:
        namespace = (account / "namespace").read_text().strip()
        path = f"apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        self._url = f"{api.rstrip('/')}/{path}"
        self._token = account / "token"  # read again each time: Kubernetes renews it
        ca = account / "ca.crt"
        self._tls = ssl.create_default_context(cafile=ca) if api.startswith("https:") else None

    def replicas(self) -> int:
        return self._exchange("GET", None)["spec"].get("replicas", 0)

    def scale(self, replicas: int) -> None:
        self._exchange("PATCH", {"spec": {"replicas": replicas}})

    def _exchange(self, method: str, body: Any) -> dict[str, Any]:
        headers = {
            "Authorization": f"Bearer {self._token.read_text().strip()}",
            "Content-Type": "application/merge-patch+json",
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
            return json.load(answer)


def look(run: str, deployment: Deployment, history: deque[int], args: argparse.Namespace) -> None:
    replicas = deployment.replicas()
    limits = {"requests": args.requests, "least": args.least, "most": args.most}
    history.append(wanted_replicas(servers_of(run), replicas=replicas, **limits))
    if (target := settled(history)) != replicas:
        print(f"{replicas} -> {target} servers", flush=True)
        deployment.scale(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scales a run's servers by queue depth.")
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--deployment", default="areal-servers")
    parser.add_argument("--requests", type=int, default=256, help="that one server is to have")
    parser.add_argument("--least", type=int, default=0, help="replicas")
    parser.add_argument("--most", type=int, default=8, help="replicas")
    parser.add_argument("--calm", type=int, default=10, help="looks before it shrinks")
    parser.add_argument("--look", type=float, default=30.0, help="seconds between two looks")
    args = parser.parse_args()
    host, port = (os.environ[f"KUBERNETES_SERVICE_{name}"] for name in ("HOST", "PORT"))
    deployment = Deployment(args.deployment, f"https://{host}:{port}", ACCOUNT)
    history: deque[int] = deque(maxlen=args.calm)
    while True:
        try:
            look(args.run, deployment, history, args)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"no look: {error}", file=sys.stderr, flush=True)  # what serves goes on serving
        time.sleep(args.look)


if __name__ == "__main__":
    main()
