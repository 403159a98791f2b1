r"""What MkDocs does to a page besides Markdown: formulas, and learning curves that exist.

In: the text of a page. Out: MathML in place of a fenced block `math` (formulas apart by an empty
line) and of inline $`x`$, which is how GitHub writes them too; an image in place of a comment
`<!-- curve: name -->` when docs/assets/curves/name.png exists, and nothing when it does not. The
stamp at the top of a translated page (docs/zh_lag.py) is left out: MkDocs takes a page's title from
its heading only if nothing stands before it. Anchors keep the letters of every language; links to
them, which mdformat writes in percent signs, are read back, or MkDocs would not find them. The HTML
of a Chinese page says that it is Chinese, by which browsers choose its glyphs.

Formulas are translated while the site is built, so a reader's browser needs no script and no
network. A formula that does not translate stops the build.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from latex2mathml.converter import convert
from markdown.extensions.toc import slugify_unicode

CURVE = re.compile(r"<!-- curve: ([\w-]+) -->")
STAMP = re.compile(r"\A<!-- translates .+? -->\s*")
ENCODED_ANCHOR = re.compile(r"(?<=\]\()([^)\s:]*#[^)\s]*%[^)\s]*)(?=\))")
INLINE = re.compile(r"\$<code>(.*?)</code>\$")


def on_config(config: Any) -> Any:
    options = config.mdx_configs.setdefault("pymdownx.superfences", {})
    options["custom_fences"] = [{"name": "math", "class": "math", "format": _display}]
    config.mdx_configs["toc"]["slugify"] = slugify_unicode
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    folder = PurePosixPath(page.file.src_uri).parent

    def image(match: re.Match[str]) -> str:
        uri = f"assets/curves/{match[1]}.png"
        if files.get_file_from_path(uri) is None:
            return ""
        path = os.path.relpath(uri, folder)
        return f"![Learning curve of {match[1]} on the arithmetic task]({path})"

    markdown = ENCODED_ANCHOR.sub(lambda match: unquote(match[1]), STAMP.sub("", markdown))
    return CURVE.sub(image, markdown)


def on_page_content(content: str, *, page: Any, config: Any, files: Any) -> str:
    return INLINE.sub(lambda match: _mathml(html.unescape(match[1]), "inline"), content)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    if page.file.src_uri.startswith("zh/"):
        return output.replace('<html lang="en"', '<html lang="zh-Hans"', 1)
    return output


def _display(source: str, *_: Any, **__: Any) -> str:
    formulas = [part.strip() for part in re.split(r"\n\s*\n", source) if part.strip()]
    return "".join(f'<div class="formula">{_mathml(part, "block")}</div>' for part in formulas)


def _mathml(source: str, display: str) -> str:
    if r"\begin{align" in source:
        raise ValueError(f"aligned formulas do not translate, write one per paragraph: {source}")
    return convert(" ".join(source.split()), display=display)
