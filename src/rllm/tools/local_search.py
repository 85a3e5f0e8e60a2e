"""Search a small corpus by words: BM25 over an inverted index in memory."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rllm.data.sources import read_file
from rllm.errors import ConfigError, concerning, shown
from rllm.tools.tool_base import MAX_OUTPUT_CHARS, Tool
from rllm.types import JSONMapping, JSONObject

__all__ = ["LocalSearch", "WordIndex"]

Query = Annotated[str, Field(description="words to look for")]
_WORD = re.compile(r"\w+")


class WordIndex:
    """Index of the words of texts, scored with BM25.

    After Robertson and Zaragoza (2009), "The Probabilistic Relevance Framework".

    Args:
        texts: the corpus; hits are positions in it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        k1, b = 1.2, 0.75  # saturation of repeated words, and penalty of long texts
        counts = [Counter(_words(text)) for text in texts]
        lengths = [sum(count.values()) for count in counts]
        mean_length = sum(lengths) / len(lengths) if any(lengths) else 1.0
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for position, count in enumerate(counts):
            scale = k1 * (1 - b + b * lengths[position] / mean_length)
            for word, times in count.items():
                self._weights[word].append((position, times * (k1 + 1) / (times + scale)))
        self._rarity = {
            word: math.log(1 + (len(texts) - len(hits) + 0.5) / (len(hits) + 0.5))
            for word, hits in self._weights.items()
        }

    def search(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Return positions and scores of the best texts, best first, ties in order; all share a word with it."""
        scores: dict[int, float] = defaultdict(float)
        for word in sorted(set(_words(query)) & self._weights.keys()):
            rarity = self._rarity[word]
            for position, weight in self._weights[word]:
                scores[position] += rarity * weight
        return nsmallest(top_k, scores.items(), key=lambda hit: (-hit[1], hit[0]))


class LocalSearch(Tool):
    """Search the documents for words, and return the best matches.

    Args:
        corpus: documents, or the path of a file of them, such as a `.jsonl`; each has a `text` and any other fields
            to show.
        top_k: number of documents to return.

    Raises:
        ConfigError: if there is no corpus, or a document has no text; the message names the line.
        MissingDependencyError: if the file needs `pyarrow`.
    """

    def __init__(
        self,
        corpus: Sequence[JSONMapping] | str | Path | None = None,
        top_k: int = 3,
        *,
        name: str = "local_search",
        description: str | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        super().__init__(name, description, max_output_chars=max_output_chars)
        if corpus is None:
            raise ConfigError("local_search: pass `corpus`, a list of documents or the path of a .jsonl file")
        if top_k < 1:
            raise ConfigError(f"local_search: top_k={top_k}: use at least 1")
        self.top_k = top_k
        with concerning("local_search"):
            documents = read_file(Path(corpus)) if isinstance(corpus, str | Path) else list(corpus)
        self._index = WordIndex([_searchable(item, number) for number, item in enumerate(documents, 1)])
        self.documents = [dict(item) for item in documents]

    def forward(self, query: Query) -> list[JSONObject]:
        """Return the documents, best first, each with its `score`."""
        hits = self._index.search(query, self.top_k)
        return [{**self.documents[position], "score": round(score, 4)} for position, score in hits]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _searchable(document: JSONMapping, number: int) -> str:
    if not isinstance(document, Mapping):
        raise ConfigError(f'local_search: document {number} is {shown(document)}; use {{"text": ...}}')
    text = document.get("text", document.get("contents"))
    if not isinstance(text, str):
        raise ConfigError(f"local_search: document {number} has no 'text'; its fields are {sorted(document)}")
    return f"{document.get('title', '')}\n{text}"
