"""A model hub on loopback, spoken to by the real huggingface_hub client.

    with LoopbackHub() as hub:
        commit = hub.push("org/name", {"config.json": b"...", "model.safetensors": b"..."})
        subprocess.run([...], env=hub.env(tmp_path))      # HF_ENDPOINT, HF_HOME, not offline
        assert hub.fetched("model.safetensors") == 1      # GETs of its bytes

Uploads: /api/repos/create, /api/validate-yaml, .../preupload/REV, NAME.git/info/lfs/objects/batch
with basic transfers, and .../commit/REV, which makes one commit of what has arrived (`lfs`, by
checksum). `private` says how a repository was created, `tokens` which may write; `cut_uploads` is
the number of uploaded files that are refused, once each.

Routes and headers are those that the client asks for: /api/models/NAME[/revision/REV], .../tree/REV
and /NAME/resolve/REV/FILE with ETag, X-Repo-Commit and ranges; the same below /api/datasets and
/datasets. Faults are attributes: `refuse` (name -> status, X-Error-Code), `refuse_files` (the same,
of files alone: what a model is remains public), `cut` (file -> bytes sent before the connection
breaks, once for each time), `stall` (file -> bytes sent before silence), `delay_s` before each part
of a file, `answer_delay_s` before an answer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PART = 64 << 10


class LoopbackHub:
    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repo -> commit -> files
        self.branches: dict[str, dict[str, str]] = {}  # repo -> branch -> commit
        self.refuse: dict[str, tuple[int, str]] = {}
        self.refuse_files: dict[str, tuple[int, str]] = {}
        self.cut: dict[str, list[int]] = {}
        self.stall: dict[str, int] = {}
        self.delay_s = self.answer_delay_s = 0.0
        self.info: dict[str, Any] = {}  # keys of the reply about a model, in place of true ones
        self.raw_info: bytes | None = None
        self.gets: Counter[str] = Counter()
        self.requests: list[str] = []
        self.lfs: dict[str, bytes] = {}  # sha256 -> an uploaded file
        self.private: dict[str, bool] = {}
        self.tokens: set[str] = set()  # that may write; empty: any
        self.cut_uploads = 0
        self._closing = threading.Event()

    def push(self, repo: str, files: dict[str, bytes] | Path, branch: str = "main") -> str:
        """A new commit of `branch`: `files`, or those of a folder."""
        if isinstance(files, Path):
            files = {file.name: file.read_bytes() for file in files.iterdir() if file.is_file()}
        digest = hashlib.sha1(repo.encode())
        for name, data in sorted(files.items()):
            digest.update(name.encode() + data)
        commit = digest.hexdigest()
        self.commits.setdefault(repo, {})[commit] = dict(files)
        self.branches.setdefault(repo, {})[branch] = commit
        return commit

    def fetched(self, file: str) -> int:
        return self.gets[file]

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """Of a process that uses this hub, with a cache of its own in `home`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**kept, **ours, **more}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LoopbackHub:
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def wait(self, seconds: float | None) -> None:
        """At most until the hub closes."""
        self._closing.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        for mark, upload in _UPLOADS.items():
            if mark in path:
                self.hub.requests.append(f"POST {path}")
                return upload(self, path, body)
        self._answer()

    def do_PUT(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        self.hub.requests.append(f"PUT {path}")
        if self.hub.cut_uploads:
            self.hub.cut_uploads -= 1
            return self._reply(403, b"")
        assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
        self.hub.lfs[path.rpartition("/")[2]] = body
        self._reply(200, b"")

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _may_write(self) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.hub.tokens and token not in self.hub.tokens:
            self._reply(401, b'{"error": "no"}')
            return False
        return True

    def _create(self, path: str, body: bytes) -> None:
        if not self._may_write():
            return
        wanted = json.loads(body)
        name = wanted["name"]
        repo = f"{wanted['organization']}/{name}" if wanted.get("organization") else name
        if repo in self.hub.commits:
            return self._reply(409, json.dumps({"url": f"{self.hub.url}/{repo}"}).encode())
        self.hub.push(repo, {})
        self.hub.private[repo] = wanted.get("private") or wanted.get("visibility") == "private"
        self._reply(200, json.dumps({"url": f"{self.hub.url}/{repo}"}).encode())

    def _check_card(self, path: str, body: bytes) -> None:
        assert json.loads(body)["content"].startswith("---\n")
        self._reply(200, b'{"errors": [], "warnings": []}')

    def _preupload(self, path: str, body: bytes) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        self._reply(200, json.dumps({"files": files, "commitOid": None}).encode())

    def _lfs_batch(self, path: str, body: bytes) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            href = f"{self.hub.url}/upload/{one['oid']}"
            missing = one["oid"] not in self.hub.lfs
            objects.append({**one, **({"actions": {"upload": {"href": href}}} if missing else {})})
        self._reply(200, json.dumps({"transfer": "basic", "objects": objects}).encode())

    def _make_commit(self, path: str, body: bytes) -> None:
        if not self._may_write():
            return
        org, name = path.removeprefix("/api/models/").split("/")[:2]
        repo = f"{org}/{name}"
        files = dict(self.hub.commits[repo][self.hub.branches[repo]["main"]])
        for line in filter(None, body.splitlines()):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
        commit = self.hub.push(repo, files)
        url = f"{self.hub.url}/{repo}/commit/{commit}"
        self._reply(200, json.dumps({"commitUrl": url, "commitOid": commit}).encode())

    def _answer(self) -> None:
        self.hub.wait(self.hub.answer_delay_s)
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        for prefix in ("/api/models/", "/api/datasets/"):
            if path.startswith(prefix):
                return self._api(path.removeprefix(prefix))
        if "/resolve/" in path:
            repo, _, rest = path.removeprefix("/datasets").lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            return self._file(repo, revision, file)
        return self._reply(404, b"{}")

    def _api(self, path: str) -> None:
        org, name, *rest = path.split("/")
        repo = f"{org}/{name}"
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self._commit(repo, revision)
        if commit is None:
            return
        files = self.hub.commits[repo][commit]
        entries = [(file, len(data), _oid(data)) for file, data in files.items()]
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            content: Any = [
                {"type": "file", "path": file, "size": size, "oid": oid}
                for file, size, oid in entries
                if file.startswith(below)
            ]
        elif rest[:1] == ["paths-info"]:
            content = []
        else:
            content = {"id": repo, "modelId": repo, "sha": commit, "tags": [], "private": False}
            content["siblings"] = [
                {"rfilename": file, "size": size, "blobId": oid} for file, size, oid in entries
            ]
            content |= self.hub.info
        body = json.dumps(content).encode()
        self._reply(200, body if self.hub.raw_info is None else self.hub.raw_info)

    def _commit(self, repo: str, revision: str) -> str | None:
        """The commit, or None after a refusal was sent."""
        if repo in self.hub.refuse:
            status, code = self.hub.refuse[repo]
            headers = {"X-Error-Code": code} if code else {}
            self._reply(status, b'{"error": "no"}', headers)
            return None
        if repo not in self.hub.commits:
            self._reply(404, b'{"error": "no"}', {"X-Error-Code": "RepoNotFound"})
            return None
        commit = self.hub.branches[repo].get(revision, revision)
        if commit not in self.hub.commits[repo]:
            self._reply(404, b'{"error": "no"}', {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit

    def _file(self, repo: str, revision: str, file: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        if repo in self.hub.refuse_files:
            status, code = self.hub.refuse_files[repo]
            return self._reply(status, b"", {"X-Error-Code": code})
        if file not in self.hub.commits[repo][commit]:
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = self.hub.commits[repo][commit][file]
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        begin = 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.gets[file] += 1
        self._reply(206 if begin else 200, data[begin:], headers, file)

    def _reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, file: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(body)
        if file and self.hub.cut.get(file):
            end = self.hub.cut[file].pop(0)
            self.close_connection = True
        if file in self.hub.stall:
            end = self.hub.stall[file]
        for begin in range(0, end, PART):
            if file:
                self.hub.wait(self.hub.delay_s)
            self.wfile.write(body[begin : min(begin + PART, end)])
        if file in self.hub.stall:
            self.wfile.flush()
            self.hub.wait(None)
            self.close_connection = True


_UPLOADS = {
    "/api/repos/create": _Handler._create,
    "/api/validate-yaml": _Handler._check_card,
    "/preupload/": _Handler._preupload,
    ".git/info/lfs/objects/batch": _Handler._lfs_batch,
    "/commit/": _Handler._make_commit,
}


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
