"""Multi-turn retrieval: the model searches a corpus by BM25 until it answers.

    question -> "search WORDS" -> documents -> "search WORDS" -> ... -> answer

A reply that begins with `search` is a search, any other the answer. The reward is 1 if the answer
is the row's, but for case, punctuation and white space. A model that needs telling gets
`instructions` as system message.
"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from pathlib import Path

from examples.search import facts
from examples.search.bm25 import BM25, words_of

NOTHING = "nothing found\n"


class Search:
    """`corpus` is a file of JSON lines with `title` and `text`; the facts of facts.py without."""

    def __init__(
        self,
        corpus: str = "",
        num_results: int = 1,
        max_searches: int = 4,
        instructions: str = "",
    ) -> None:
        self.index, self.texts = _index_of(corpus)
        self.num_results = num_results
        self.searches_left = max_searches
        self.instructions = instructions

    async def reset(self, row):
        self.answer = words_of(row["answer"])
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return system + row["messages"]

    async def step(self, action):
        verb, _, query = action.strip().partition(" ")
        if verb.casefold() == "search" and self.searches_left > 0:
            self.searches_left -= 1
            best = self.index.best(query, self.num_results)
            return "".join(self.texts[number] for number in best) or NOTHING, 0.0, False
        return "", float(words_of(action) == self.answer), True


_lock = threading.Lock()  # environments are made in threads, and an index only once


def _index_of(corpus: str) -> tuple[BM25, list[str]]:
    with _lock:
        return _make_index(corpus)


@lru_cache(4)
def _make_index(corpus: str) -> tuple[BM25, list[str]]:
    documents = read_corpus(corpus) if corpus else facts.documents()
    # A title counts twice: a document about a thing comes before those that mention it.
    index = BM25(f"{title} {title} {text}" for title, text in documents)
    return index, [f"{title}: {text}\n" for title, text in documents]


def read_corpus(corpus: str) -> list[tuple[str, str]]:
    documents = []
    with Path(corpus).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                documents.append((str(row["title"]), str(row["text"])))
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{corpus}, line {number}: expected a JSON object with title and text, found "
                    f"{line.strip()!r:.80}"
                ) from None
    return documents
