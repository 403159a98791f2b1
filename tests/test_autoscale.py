"""examples/cluster/autoscale.py: the rule by queue depth, and the API it scales through."""

from __future__ import annotations

import importlib.util
import json
import shlex
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from areal.cli.main import _parse
from areal.cli.train import load_config
from areal.run.paths import RunPaths

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "cluster"
LIMITS = {"requests": 100, "least": 0, "most": 4}


@pytest.fixture(scope="module")
def autoscale():
    spec = importlib.util.spec_from_file_location("autoscale", FOLDER / "autoscale.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def server(running=0, waiting=0, state="serving"):
    return {"address": "a:1", "state": state, "running": running, "waiting": waiting}


@pytest.mark.parametrize(
    ("servers", "replicas", "wanted"),
    [
        ([server(80)], 0, 0),  # the run's own server is enough
        ([server(100, 1)], 0, 1),
        ([server(100, 150)], 0, 2),
        ([server(100, 900)], 0, 4),  # no more than --most
        ([server(60), server(60), server(60)], 2, 1),  # one of the run's own
        ([server(0), server(0)], 1, 0),
        ([server(90), server(50, state="draining")], 0, 0),  # whose requests end by themselves
        ([server(90), {"address": "b:1", "state": "silent", "version": 3}], 1, 1),
        ([server(100, 20), {"address": "b:1", "state": "serving", "version": 3}], 1, 1),
        ([], 1, 0),
    ],
)
def test_the_rule(autoscale, servers, replicas, wanted):
    assert autoscale.wanted_replicas(servers, replicas=replicas, **LIMITS) == wanted


def test_it_grows_at_once_and_shrinks_late(autoscale):
    history, replicas = deque([], maxlen=3), []
    for wanted in (1, 3, 2, 1, 1, 1, 4):
        history.append(wanted)
        replicas.append(autoscale.settled(history))
    assert replicas == [1, 3, 3, 3, 2, 1, 4]


@pytest.fixture
def api():
    """The scale of one deployment, as Kubernetes serves it."""
    seen = []

    class Scale(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_PATCH(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            self.answer(json.loads(body))

        def answer(self, body):
            seen.append((self.command, self.path, self.headers["Authorization"], body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"spec": {"replicas": 2}}).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Scale) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}", seen
        listener.shutdown()


def test_it_sets_the_scale_of_the_deployment(autoscale, api, tmp_path):
    url, seen = api
    (tmp_path / "namespace").write_text("training\n")
    (tmp_path / "token").write_text("secret\n")
    deployment = autoscale.Deployment("areal-servers", url, tmp_path)
    assert deployment.replicas() == 2
    deployment.scale(5)
    path = "/apis/apps/v1/namespaces/training/deployments/areal-servers/scale"
    body = {"spec": {"replicas": 5}}
    assert seen == [("GET", path, "Bearer secret", None), ("PATCH", path, "Bearer secret", body)]


def test_the_pods_join_the_run_of_the_job():
    documents = list(yaml.safe_load_all((FOLDER / "kuberay_servers.yaml").read_text()))
    servers, scaler, account, role, binding = documents
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    config_file, *overrides = shlex.split(job["spec"]["entrypoint"])[5:]
    assert config_file.endswith("gsm8k_grpo.yaml")
    example = ROOT / "examples" / "math" / "gsm8k_grpo.yaml"
    run = RunPaths.of(load_config([str(example), *overrides, "scheduler.type=ray"])).root
    (pod,) = servers["spec"]["template"]["spec"]["containers"]
    args = _parse(pod["command"][1:])
    assert (args.action, args.folder, args.address) == ("join", str(run), None)
    (pod,) = scaler["spec"]["template"]["spec"]["containers"]
    assert pod["command"][2] == str(run)
    for deployment in (servers, scaler):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
    (rule,) = role["rules"]
    assert rule["resourceNames"] == [servers["metadata"]["name"]]
    assert rule["verbs"] == ["get", "patch"] and rule["resources"] == ["deployments/scale"]
    name = account["metadata"]["name"]
    assert scaler["spec"]["template"]["spec"]["serviceAccountName"] == name
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name}]
