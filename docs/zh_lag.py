"""Which pages of docs/zh lag behind their English page, and the stamp that says they do not.

    python docs/zh_lag.py                             # a line for each page that lags
    python docs/zh_lag.py --stamp docs/quickstart.md  # its translation is up to date

A translation has the path of its English page below docs/zh (README.zh.md that of README.md) and
begins with a comment that holds the SHA-256 of the English text it translates. It lags when that
text is another one now. A page is stamped only if each section has the code blocks, the code in
sentences, the formulas and the comments for programs of the same section of the English page.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ZH = DOCS / "zh"
REFERENCE = DOCS / "reference"  # generated from the code, in English only
STAMP = re.compile(r"\A<!-- translates sha256:([0-9a-f]{64}) -->\n")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- (?:not run|curve): .+? -->")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
BLOCK_PLACE = "\0"
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\n).)+?)(?<!`)\1(?!`)", re.DOTALL)


def english_pages() -> list[Path]:
    """The pages that have, or should have, a translation."""
    pages = sorted(DOCS.rglob("*.md"))
    return [ROOT / "README.md", *(p for p in pages if not {ZH, REFERENCE} & set(p.parents))]


def translations() -> list[Path]:
    return [ROOT / "README.zh.md", *sorted(ZH.rglob("*.md"))]


def translation_of(english: Path) -> Path:
    if english == ROOT / "README.md":
        return ROOT / "README.zh.md"
    return ZH / english.relative_to(DOCS)


def original_of(translation: Path) -> Path:
    if translation == ROOT / "README.zh.md":
        return ROOT / "README.md"
    return DOCS / translation.relative_to(ZH)


def why_lags(english: Path) -> str | None:
    """What is to be done about the translation of a page; None if it is up to date."""
    translation = translation_of(english)
    if not translation.is_file():
        return f"{_name(english)}: no translation yet; write {_name(translation)}"
    stamp = STAMP.match(_text(translation))
    if stamp is None:
        return f"{_name(translation)}: no stamp; compare it with {_name(english)} and stamp it"
    if stamp[1] != fingerprint(english):
        return f"{_name(translation)}: {_name(english)} has changed since; carry it over"
    return None


def fingerprint(english: Path) -> str:
    return hashlib.sha256(_text(english).encode()).hexdigest()


def faults(english: Path) -> list[str]:
    """What a translation must share with its page, section by section, and does not."""
    translation = translation_of(english)
    ours, theirs = _sections(STAMP.sub("", _text(translation))), _sections(_text(english))
    levels = [section.level for section in theirs]
    if [section.level for section in ours] != levels:
        found = f"headings are not those of {_name(english)}, which has {len(levels)}"
        return [f"{_name(translation)}: {found} (levels {levels}), found {len(ours)}"]
    return [
        f"{_name(translation)}, section {mine.title!r}: {fault}"
        for mine, other in zip(ours, theirs, strict=True)
        for fault in _differences(mine, other)
    ]


class Section(NamedTuple):
    """The text from one heading to the next, without what is translated."""

    title: str
    level: int
    blocks: list[str]
    comments: list[str]
    spans: set[str]  # inline code and formulas


def _sections(text: str) -> list[Section]:
    blocks = FENCE.findall(text)
    prose = FENCE.sub(BLOCK_PLACE, text)  # a line of a block may begin like a heading
    headings = list(HEADING.finditer(prose))
    ends = [*(heading.start() for heading in headings[1:]), len(prose)]
    sections, taken = [], 0
    for heading, end in zip(headings, ends, strict=True):
        part = prose[heading.start() : end]
        until = taken + part.count(BLOCK_PLACE)
        spans = {" ".join(span.split()) for _, span in CODE_SPAN.findall(part)}
        level, title = len(heading[1]), heading[2]
        sections.append(Section(title, level, blocks[taken:until], COMMENT.findall(part), spans))
        taken = until
    return sections


def _differences(ours: Section, theirs: Section) -> list[str]:
    found = []
    if ours.blocks != theirs.blocks:
        found.append(f"its code blocks are not the {len(theirs.blocks)} of the source")
    if ours.comments != theirs.comments:
        found.append(f"comments {ours.comments}, in the source {theirs.comments}")
    if ours.spans != theirs.spans:
        missing, strange = sorted(theirs.spans - ours.spans), sorted(ours.spans - theirs.spans)
        found.append(f"code in sentences: missing {missing}, not in the source {strange}")
    return found


def stamp(english: Path) -> None:
    translation = translation_of(english)
    text = STAMP.sub("", _text(translation)).lstrip()
    head = f"<!-- translates sha256:{fingerprint(english)} -->\n\n"
    translation.write_text(head + text, encoding="utf-8")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _stamp_all(names: Sequence[str]) -> int:
    """Stamps the named pages, English or translated, whose translation is whole."""
    for name in names:
        page = Path(name).resolve()
        english = original_of(page) if page in translations() else page
        if english not in english_pages() or not translation_of(english).is_file():
            print(f"{name}: not a page with a translation below docs/zh", file=sys.stderr)
            return 2
        if found := faults(english):
            print("\n".join(found), file=sys.stderr)
            return 1
        stamp(english)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pages of docs/zh that lag behind the English.")
    parser.add_argument("--stamp", nargs="+", metavar="PAGE", help="pages that are up to date now")
    options = parser.parse_args(arguments)
    if options.stamp:
        return _stamp_all(options.stamp)
    lagging = [reason for page in english_pages() if (reason := why_lags(page))]
    print("\n".join(lagging) if lagging else "No page lags.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
