"""The dashboard in a real Chromium: when the first paint comes, and how long a view takes.

    rows = in_browser(folder_of_runs, task=7, laps=5)

`areal dash` serves in a process of its own, as for a user. Times are of the page's own clock, from
the request (first paint) or the change of the address (a view) to the moment it is drawn. Beside
them stands the CPU time of a view in the server and in all processes of Chromium (mean of the laps,
`_cpu`), which other work on the machine stretches far less than the clock. Needs Playwright (`make
test-browser` installs it into .venv-browser) and Chromium.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import Row

from areal.utils.stacks import descendants

sys.path.append(str(Path(__file__).resolve().parents[1] / ".venv-browser"))

# Name -> place in the page; {task} is a stored sample's prompt.
PLACES = {
    "now": "now",
    "seconds": "seconds",
    "samples": "samples",
    "samples_by_text": "samples?text=not+in+any+text",
    "sample": "sample?task={task}&sample=0",
    "prompts": "prompts",
    "prompt": "prompt?task={task}",
    "curves": "curves",
    "config": "config",
}
# Waits without polling, which would count as CPU time of the view.
_VISIT = """async (place) => {
  const main = document.getElementById("main");
  const view = place.split("?")[0];
  delete main.dataset.ready;
  const began = performance.now();
  await new Promise((resolve) => {
    const observer = new MutationObserver(() => {
      if (main.dataset.ready !== view) return;
      observer.disconnect();
      resolve();
    });
    observer.observe(main, { attributes: true });
    location.hash = "#" + place;
  });
  await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""
_FIRST_PAINT = """async () => {
  const main = document.getElementById("main");
  while (!main.dataset.ready) await new Promise(requestAnimationFrame);
  const drawn = performance.now();
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  return [paint.startTime, drawn];
}"""


def in_browser(root: Path, *, task: int, laps: int) -> list[Row]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("Chromium is missing (Debian: apt-get install chromium)")
    command = [sys.executable, "-m", "areal.cli.main", "dash", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            link = server.stdout.readline().strip()
            with sync_playwright() as playwright:
                # Chromium's sandbox does not start as root.
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox"]
                )
                return _measure(browser, link, task, laps)
        finally:
            server.terminate()


def _measure(browser: Any, link: str, task: int, laps: int) -> list[Row]:
    paints: list[float] = []
    first_views: list[float] = []
    for _ in range(laps):  # each as for a new visitor, with an empty cache
        context = browser.new_context(viewport={"width": 1180, "height": 800})
        page = context.new_page()
        page.goto(link)
        painted, drawn = page.evaluate(_FIRST_PAINT)
        paints.append(painted)
        first_views.append(drawn)
        context.close()
    rows = [*_rows("browser_first_paint", paints), *_rows("browser_first_view", first_views)]
    page = browser.new_page(viewport={"width": 1180, "height": 800})
    page.goto(link)
    page.evaluate(_FIRST_PAINT)
    for name, place in PLACES.items():
        times, cpu_s = [], 0.0
        for _ in range(laps):
            page.evaluate(_VISIT, "config?run=0" if name != "config" else "prompts?run=0")
            query = "&" if "?" in place else "?"
            began = _children_cpu_s()
            times.append(page.evaluate(_VISIT, f"{place.format(task=task)}{query}run=0"))
            cpu_s += _children_cpu_s() - began
        rows += _rows(f"browser_{name}", times)
        rows.append(Row(f"browser_{name}_cpu", 1000 * cpu_s / laps, "ms"))
    return rows


def _children_cpu_s() -> float:
    """CPU time so far of all living descendants: the server, Chromium, Playwright's driver."""
    ticks = 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            # The name, which may hold anything, ends with the last parenthesis.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _rows(name: str, times: list[float]) -> list[Row]:
    return [
        Row(name, statistics.median(times), "ms"),
        Row(f"{name}_slowest", max(times), "ms"),
    ]
