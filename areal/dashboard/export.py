"""The dashboard as one HTML file: page, style, script and the data of the runs, to be shared.

The file asks nobody: the replies of the routes are embedded as JSON, and a content security policy
with the hashes of style and script allows nothing else to run or load.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from areal.api.json_text import dumps
from areal.dashboard.routes import Routes
from areal.dashboard.server import PAGE

_SAMPLES = 200  # newest ones of each run in the list
_STRIPS = 64  # of these with their tokens


def export_page(routes: Routes) -> str:
    html, style, script = (
        (PAGE / name).read_text(encoding="utf-8") for name in ("index.html", "style.css", "app.js")
    )
    # As text in a script element: only "<" could end it.
    data = dumps(collect(routes)).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    parts = {
        '<link rel="stylesheet" href="/style.css">': (
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f"<style>{style}</style>"
        ),
        '<script src="/app.js" defer></script>': "",
        "</body>": (
            f'<script type="application/json" id="embedded">{data}</script>\n'
            f"<script>{script}</script>\n</body>"
        ),
    }
    for mark, replacement in parts.items():
        assert html.count(mark) == 1, mark
        html = html.replace(mark, replacement)
    return html


def collect(routes: Routes) -> dict[str, Any]:
    """Path -> reply, of what the page asks for first; LookupErrors are left out."""
    runs = routes.answer("runs", {})
    found: dict[str, Any] = {"runs": runs}
    readable = [run["id"] for run in runs if run["state"] != "unreadable"]
    for number in readable:
        for view in ("now", "seconds", "keys", "curves", "config", "prompts"):
            found[f"run/{number}/{view}"] = routes.answer(f"run/{number}/{view}", {})
        found |= _samples(routes, number)
    found |= _evaluations(routes)
    for first in readable:
        for second in readable:
            if first != second:
                path = f"diff?first={first}&second={second}"
                found[path] = routes.answer("diff", {"first": str(first), "second": str(second)})
    return found


def _evaluations(routes: Routes) -> dict[str, Any]:
    files = routes.answer("evals", {})
    found: dict[str, Any] = {"evals": files}
    for file in files:
        for one in file["evaluations"]:
            asked = {"evaluation": one["id"], "limit": str(_SAMPLES)}
            reply = routes.answer(f"eval/{file['id']}/results", asked)
            found[f"eval/{file['id']}/results?evaluation={one['id']}"] = reply
    return found


def _samples(routes: Routes, number: int) -> dict[str, Any]:
    listed = routes.answer(f"run/{number}/samples", {"limit": str(_SAMPLES)})
    found = {f"run/{number}/samples": listed}
    for sample in listed["samples"][:_STRIPS]:
        paths = (
            f"run/{number}/sample/{sample['task_id']}/{sample['sample']}",
            f"run/{number}/prompt/{sample['task_id']}",
        )
        found |= {path: routes.answer(path, {}) for path in paths if path not in found}
    return found


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
