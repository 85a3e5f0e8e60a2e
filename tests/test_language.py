"""The source and the documentation are in plain English, and types are exact; `tests/house.py` counts."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from .house import MAX_ANY, MAX_COLUMNS, ODD_WORDS, ROOT, House

NOT_YET: set[str] = {"algorithms", "config", "engine", "gateway", "inference", "parser", "trainer"}
"""Packages that are not checked yet. It only shrinks."""
PAGES_NOT_YET = True
"""Whether pages are not checked yet: README and `docs/`."""
_CODE = re.compile(
    r"^( {0,3}```.*?^ {0,3}```| {4,}[^\n]*|\s*<!--.*?-->)|`[^`\n]*`|\"[^\"\n]*\"", re.DOTALL | re.MULTILINE
)
"""Code, comments and quoted examples in a page, which may have any words."""


@pytest.fixture(scope="module")
def house():
    return House()


def packages_with(found, house):
    """Return the findings of each package that is checked."""
    by_package = defaultdict(list)
    for path, finding in found:
        by_package[house.package_of(path)].append(finding)
    return {name: findings for name, findings in by_package.items() if name not in NOT_YET}


def test_docstrings_and_comments_have_no_odd_words(house):
    assert packages_with(house.odd_words(), house) == {}


def test_docstrings_begin_with_a_verb_or_a_noun(house):
    assert packages_with(house.odd_beginnings(), house) == {}


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.xfail(PAGES_NOT_YET, reason="pages are being rewritten", strict=False)
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_odd_words(page: Path):
    prose = _CODE.sub("", page.read_text(encoding="utf-8"))
    assert [line for line in prose.splitlines() if ODD_WORDS.search(line)] == []


@pytest.mark.xfail(bool(NOT_YET), reason="packages are being typed", strict=False)
def test_types_are_exact(house):
    assert house.any_per_1000 <= MAX_ANY


@pytest.mark.xfail(bool(NOT_YET), reason="packages are being rewritten", strict=False)
def test_lines_are_short(house):
    assert list(house.long_lines()) == [], f"at most {MAX_COLUMNS} columns"
