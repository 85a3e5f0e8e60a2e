"""The source and the documentation are in plain English, and types are exact; `tests/house.py` counts."""

import re
from pathlib import Path

import pytest

from .house import MAX_ANY, ODD_WORDS, ROOT, House

_CODE = re.compile(
    r"^( {0,3}```.*?^ {0,3}```| {4,}[^\n]*|\s*<!--.*?-->)|`[^`\n]*`|\"[^\"\n]*\"", re.DOTALL | re.MULTILINE
)
"""Code, comments and quoted examples in a page, which may have any words."""


@pytest.fixture(scope="module")
def house():
    return House()


def test_docstrings_and_comments_have_no_odd_words(house):
    assert [finding for _, finding in house.odd_words()] == []


def test_messages_have_no_odd_words(house):
    assert list(house.odd_messages()) == []


def test_docstring_of_a_package_names_its_modules(house):
    assert list(house.missing_from_maps()) == []


def test_docstrings_begin_with_a_verb_or_a_noun(house):
    assert [finding for _, finding in house.odd_beginnings()] == []


def test_tests_examples_and_benchmarks_are_in_plain_english(house):
    found = [*house.odd_words(house.tests), *house.odd_beginnings(house.tests)]
    assert [finding for _, finding in found] == []


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_odd_words(page: Path):
    prose = _CODE.sub("", page.read_text(encoding="utf-8"))
    assert [line for line in prose.splitlines() if ODD_WORDS.search(line)] == []


def test_types_are_exact(house):
    assert house.any_per_1000 <= MAX_ANY
