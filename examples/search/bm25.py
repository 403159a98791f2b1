"""BM25: which documents of a corpus fit the words of a query best.

index = BM25(["a cat on a mat", "a dog"])
index.best("cat", limit=1)          # [0]: numbers of documents, the best first

A document's score is the sum, over the words it shares with the query, of how rare the word is in
the corpus times how often the document has it; the latter saturates (`k1`), and counts less in a
document that is longer than the mean (`b`). A query costs as much as its words have documents.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class BM25:
    def __init__(self, documents: Iterable[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self._k1, self._b = k1, b
        self._lengths: list[int] = []
        # word -> (document, how often it has the word)
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, document in enumerate(documents):
            words = words_of(document)
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._places[word].append((number, count))
        if not self._lengths:
            raise ValueError("the corpus has no documents")
        self._mean_length = max(sum(self._lengths) / len(self._lengths), 1.0)

    def best(self, query: str, limit: int) -> list[int]:
        """At most `limit` documents that share a word with `query`; equal ones in corpus order."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            for number, count in self._places.get(word, ()):
                scores[number] += self._rarity(word) * self._weight(count, self._lengths[number])
        return sorted(scores, key=lambda number: (-scores[number], number))[:limit]

    def _rarity(self, word: str) -> float:
        num_with = len(self._places[word])
        return math.log(1 + (len(self._lengths) - num_with + 0.5) / (num_with + 0.5))

    def _weight(self, count: int, length: int) -> float:
        norm = 1 - self._b + self._b * length / self._mean_length
        return count * (self._k1 + 1) / (count + self._k1 * norm)
