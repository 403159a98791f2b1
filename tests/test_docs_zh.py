"""The Chinese pages: each has its English page, the same code, and links that lead somewhere.

A page that lags behind its English page (docs/zh_lag.py) is skipped with the reason, because a
change of the English text must be able to land without a translator. A page that does not lag is
held to it: code blocks and code in sentences are those that tests/test_docs.py runs and looks up.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from functools import cache
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
from markdown.extensions.toc import slugify_unicode

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SCRIPT = ROOT / "docs" / "zh_lag.py"


def load_script(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("zh_lag", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zh_lag = load_script(SCRIPT)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("english", zh_lag.english_pages(), ids=page_id)
def test_page_is_translated(english):
    if reason := zh_lag.why_lags(english):
        pytest.skip(reason)
    found = zh_lag.faults(english)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", zh_lag.translations(), ids=page_id)
def test_page_has_a_source_and_a_stamp(page):
    assert zh_lag.original_of(page).is_file(), "its English page is gone: move or delete this one"
    stamp = zh_lag.STAMP.match(page.read_text(encoding="utf-8"))
    assert stamp is not None, "python docs/zh_lag.py --stamp writes the first line"


@pytest.mark.parametrize("page", zh_lag.translations(), ids=page_id)
def test_links_lead_somewhere(page):
    prose = zh_lag.FENCE.sub("", page.read_text(encoding="utf-8"))
    wrong = [link for link in LINK.findall(prose) if "://" not in link and not leads(page, link)]
    assert not wrong, f"{page_id(page)} has links to nowhere: {wrong}"


def leads(page: Path, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")  # mdformat writes Chinese anchors in percents
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors_of(target))


@cache
def anchors_of(page: Path) -> set[str]:
    """Of its headings, as MkDocs writes them: the second of one name ends in _1."""
    prose = zh_lag.FENCE.sub("", page.read_text(encoding="utf-8"))
    anchors: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        slug = slugify_unicode(re.sub(r"\]\([^)]*\)", "", title), "-")
        same = sum(1 for anchor in anchors if re.fullmatch(rf"{re.escape(slug)}(_\d+)?", anchor))
        anchors.add(f"{slug}_{same}" if same else slug)
    return anchors


@pytest.fixture
def small_docs(tmp_path):
    """The script in a repository of one page and its translation."""
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    module = load_script(shutil.copy(SCRIPT, tmp_path / "docs"))
    (tmp_path / "README.md").write_text("# areal\n")
    (module.DOCS / "page.md").write_text(
        "# Page\n\nSet `key`.\n\n```bash\nareal demo\n```\n\n## Then\n"
    )
    (module.ZH / "page.md").write_text(
        "# 页面\n\n设置 `key`。\n\n```bash\nareal demo\n```\n\n## 之后\n"
    )
    return module


def test_a_stamp_holds_until_the_english_page_changes(small_docs, capsys):
    english = small_docs.DOCS / "page.md"
    assert "no stamp" in small_docs.why_lags(english)
    assert small_docs.main(["--stamp", str(small_docs.ZH / "page.md")]) == 0
    assert small_docs.why_lags(english) is None
    english.write_text(english.read_text() + "\nMore.\n")
    assert "has changed since" in small_docs.why_lags(english)
    assert small_docs.main(["--stamp", str(english)]) == 0
    assert small_docs.why_lags(english) is None
    assert small_docs.main([]) == 0
    assert capsys.readouterr().out == "README.md: no translation yet; write README.zh.md\n"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("areal demo", "areal dmeo", "code blocks"),
        ("`key`", "`kye`", "code in sentences"),
        ("设置", "## 小节\n\n设置", "headings"),
        ("```bash", "<!-- not run: needs a CUDA device -->\n\n```bash", "comments"),
        (
            "设置 `key`。\n\n```bash\nareal demo\n```\n\n## 之后\n",
            "## 之后\n\n设置 `key`。\n",
            "section",
        ),
    ],
)
def test_a_page_that_differs_is_not_stamped(small_docs, capsys, old, new, fault):
    page = small_docs.ZH / "page.md"
    page.write_text(page.read_text().replace(old, new))
    assert small_docs.main(["--stamp", str(page)]) == 1
    assert fault in capsys.readouterr().err
    assert small_docs.why_lags(small_docs.DOCS / "page.md") is not None


def test_a_page_that_is_none_is_refused(small_docs, capsys):
    assert small_docs.main(["--stamp", str(small_docs.DOCS / "no_such.md")]) == 2
    assert "not a page with a translation" in capsys.readouterr().err
