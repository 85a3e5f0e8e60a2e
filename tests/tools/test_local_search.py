import json
import math
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.tools.local_search import LocalSearch, WordIndex

CORPUS = [
    {"id": 1, "title": "Danube", "text": "The Danube is a river that flows through Vienna."},
    {"id": 2, "title": "Vienna", "text": "Vienna is the capital of Austria."},
    {"id": 3, "title": "Python", "text": "Python is a programming language."},
]


def test_best_document_comes_first() -> None:
    search = LocalSearch(CORPUS, top_k=2)

    assert [hit["id"] for hit in search(query="river Vienna").output] == [1, 2]
    assert [hit["id"] for hit in search(query="capital of AUSTRIA?").output] == [2]
    assert search(query="zebra").output == []


def test_scores_are_bm25() -> None:
    """Two texts of two words: `a` is in one of them, once, so its weight is 1 and its score the rarity of the word."""
    index = WordIndex(["a b", "b b"])

    assert index.search("a", 5) == [(0, pytest.approx(math.log(1 + 1.5 / 1.5)))]
    (best, score), _ = index.search("b", 5)
    assert best == 1
    assert score == pytest.approx(math.log(1 + 0.5 / 2.5) * 2 * 2.2 / (2 + 1.2))


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    index = WordIndex(["same words"] * 50)

    assert [position for position, _ in index.search("words same", 4)] == [0, 1, 2, 3]


def test_empty_corpus_has_no_hits() -> None:
    assert LocalSearch([])(query="anything").output == []
    assert WordIndex(["", ""]).search("anything", 1) == []


def test_corpus_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(document) for document in CORPUS) + "\n\n", encoding="utf-8-sig")

    assert LocalSearch(path)(query="programming").output[0]["title"] == "Python"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "local_search: .*corpus.jsonl, line 2, column 2 is not valid JSON"),
        ("[]", "corpus.jsonl, line 2 is a list"),
        ("\udcff", "corpus.jsonl, line 2 cannot be read: .*; save the file as UTF-8"),
        ("{}", "document 2 has no 'text'"),
    ],
)
def test_invalid_line_is_reported(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line.encode(errors="surrogateescape"))

    with pytest.raises(ConfigError, match=reason):
        LocalSearch(path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "pass `corpus`"),
        ({"corpus": "/nowhere.jsonl"}, "local_search: '/nowhere.jsonl': no such file"),
        ({"corpus": [], "top_k": 0}, "top_k=0"),
        ({"corpus": ["rivers"]}, r"document 1 is 'rivers'; use \{\"text\": ...\}"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LocalSearch(**settings)
