"""The page in a real Chromium: every view, keyboard, hostile texts, narrow and dark, exported.

With AREAL_SCREENSHOTS=FOLDER the pictures of the documentation are drawn there.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from dashboard_world import TOKEN, Dash, WrittenRun, write_evaluation

from areal.cli.main import main

sys.path.append(str(Path(__file__).resolve().parents[2] / ".venv-browser"))
pytestmark = pytest.mark.real_browser

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run = WrittenRun(root / "math" / "first", steps=30)
    with run.database.transaction() as connection:
        connection.execute("UPDATE samples SET prompt = ?, output = ?", (HOSTILE, HOSTILE))
        connection.execute("UPDATE pieces SET text = ?", (HOSTILE,))
        connection.execute("UPDATE tasks SET why = ? WHERE why != ''", (HOSTILE,))
    run.database.record_event("odd", HOSTILE)
    run.finish()
    write_evaluation(root / "eval.db", text=HOSTILE)
    WrittenRun(root / "math" / "second", steps=5, **{"rollout/reward": 0.9}).finish()
    return root


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("Chromium is missing: make test-browser installs it, or says how")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start as root.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1180, "height": 800})
    page = context.new_page()
    page.set_default_timeout(600_000)  # on a busy machine everything takes long
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda line: line.type == "error" and page.faults.append(line.text))
    yield page
    assert page.faults == []
    context.close()


@pytest.fixture(scope="module")
def dash(root):
    dash = Dash(root)
    yield dash
    dash.close()


def visit(page, dash, view: str, **params) -> None:
    query = "&".join(f"{key}={value}" for key, value in {"run": 0, **params}.items())
    page.goto(f"http://127.0.0.1:{dash.port}/?token={TOKEN}")
    page.goto(f"http://127.0.0.1:{dash.port}/#{view}?{query}")
    page.wait_for_selector(f"main[data-ready={view}]")


def test_hostile_texts_stay_texts(page, dash):
    views = {
        "now": {},
        "samples": {},
        "sample": {"task": 58, "sample": 0},
        "prompts": {"state": "failed"},
        "prompt": {"task": 58},
        "results": {"file": 0, "evaluation": "e1"},
    }
    for view, params in views.items():
        visit(page, dash, view, **params)
        assert "onerror" in page.inner_text("main")
        assert "owned" not in page.title()
        assert page.locator("main img, main script").count() == 0


def test_the_link_leaves_no_token_in_the_address(page, dash):
    visit(page, dash, "now")
    assert TOKEN not in page.url
    assert "step 30 of 40" in page.inner_text("main")


def test_where_the_second_went_adds_up(page, dash):
    visit(page, dash, "seconds")
    tables = page.locator("table.shares")
    assert tables.count() == 3  # trainer, servers, rollout
    for i in range(3):
        shares = tables.nth(i).locator("td.number:nth-child(2)").all_inner_texts()
        assert 98 <= sum(float(text.removesuffix(" %")) for text in shares) <= 102
    verdict = page.inner_text("#verdict")
    assert "Largest loss of the trainer's time: waiting for episodes, 30%" in verdict
    assert "of the servers' time" in verdict and "of the prompts' time" in verdict


def test_samples_are_filtered_and_opened_by_keyboard(page, dash):
    from playwright.sync_api import expect

    visit(page, dash, "samples")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    page.fill("input[name=min_reward]", "0.5")
    page.keyboard.press("Enter")
    # Not wait_for_function, which the page's policy forbids: it evaluates a text.
    expect(page.locator("tr.row")).to_have_count(30)
    assert "min_reward=0.5" in page.url
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-ready=sample]")
    assert "task=56" in page.url and "sample=0" in page.url


def test_tokens_are_coloured_and_told_apart(page, dash):
    visit(page, dash, "sample", run=1, task=8, sample=1)
    spans = page.locator("#strip span")
    assert [spans.nth(i).get_attribute("class") for i in range(5)] == [
        "prompt",
        "prompt",
        "",
        "tool",
        "",
    ]

    def tints() -> list[str]:
        return [spans.nth(i).evaluate("s => s.style.background") for i in (2, 4)]

    by_logprob = tints()
    assert all(by_logprob) and by_logprob[0] != by_logprob[1]
    page.keyboard.press("c")
    assert page.locator("button[aria-pressed=true]").inner_text() == "ratio"
    assert tints() != by_logprob
    page.click("button[data-colour=entropy]")
    by_entropy = tints()
    assert all(by_entropy) and by_entropy[0] != by_entropy[1] and by_entropy != by_logprob
    spans.nth(2).hover()
    assert "logprob -2" in page.inner_text("#detail")
    assert "entropy 0.50" in page.inner_text("#detail")
    assert page.locator("#missing").count() == 0
    visit(page, dash, "sample", run=1, task=0, sample=1)
    assert page.locator("button[data-colour=entropy]").count() == 0
    assert "Entropy was not computed" in page.inner_text("#missing")


def test_curves_of_two_runs_and_their_configs(page, dash):
    visit(page, dash, "curves", runs="0,1", key="rollout/reward")
    assert page.locator(".charts .card").first.locator("polyline").count() == 2
    page.keyboard.press("6")
    page.wait_for_selector("main[data-ready=config]")
    assert "actor.optimizer.lr" in page.inner_text("main")
    visit(page, dash, "config", other=1)
    assert "0 keys differ" in page.inner_text("main")


def test_samples_of_an_evaluation(page, dash):
    visit(page, dash, "evals")
    page.locator("tr.row").click()
    page.wait_for_selector("main[data-ready=results]")
    assert page.locator("tbody tr").count() == 3
    page.select_option("select[name=state]", "failed")
    page.locator("tbody tr").nth(2).wait_for(state="detached")
    assert page.locator("tbody tr").count() == 1
    assert "TimeoutError: 3 s" in page.inner_text("tbody")


def test_narrow_screens_need_no_sideways_scrolling(page, dash):
    page.set_viewport_size({"width": 380, "height": 800})
    for view in ("now", "seconds", "samples", "prompts", "curves", "config"):
        visit(page, dash, view)
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, view


def test_dark_and_light(page, dash):
    visit(page, dash, "now")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.keyboard.press("t")
    assert page.evaluate(ground) != before
    page.reload()
    page.wait_for_selector("main[data-ready=now]")
    assert page.evaluate(ground) != before  # remembered


def test_a_file_to_share_shows_the_same(page, root, tmp_path):
    file = tmp_path / "shared.html"
    assert main(["dash", str(root), "--export", str(file)]) == 0
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for view in ("now", "seconds", "samples", "prompts", "curves", "config", "evals"):
        page.goto(f"{file.as_uri()}#{view}?run=0")
        page.wait_for_selector(f"main[data-ready={view}]")
        assert page.locator(".error").count() == 0, view
    page.locator("tr.row").click()
    page.wait_for_selector("main[data-ready=results]")
    assert page.locator("tbody tr").count() == 3
    page.goto(f"{file.as_uri()}#sample?run=0&task=58&sample=1")
    page.wait_for_selector("#strip span")
    assert "owned" not in page.title()
    assert all(url.startswith("file:") for url in asked)


@pytest.mark.skipif(
    "AREAL_SCREENSHOTS" not in os.environ, reason="AREAL_SCREENSHOTS names no folder"
)
def test_pictures_of_the_documentation(page):
    """Of the run at AREAL_SCREENSHOTS_RUN, such as that of the demo."""
    folder, run = Path(os.environ["AREAL_SCREENSHOTS"]), os.environ["AREAL_SCREENSHOTS_RUN"]
    folder.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size({"width": 1000, "height": 640})
    dash = Dash(Path(run))
    try:
        for view in ("now", "seconds", "curves"):
            visit(page, dash, view)
            page.screenshot(path=folder / f"dashboard_{view}.png")
        visit(page, dash, "samples", min_reward=1)
        page.screenshot(path=folder / "dashboard_samples.png")
    finally:
        dash.close()
