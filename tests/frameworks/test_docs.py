"""The pages of docs/frameworks show code that runs, and numbers that were measured. Fast: nothing is installed or run."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from .rollouts import EXAMPLES
from .table import DOCS, RESULTS, read_rows, table, with_table

NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_table_is_what_the_results_say():
    page = (DOCS / "index.md").read_text()
    assert with_table(page) == page, "run: python tests/frameworks/table.py"
    assert len(table().splitlines()) > 2


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_code_of_the_example(name):
    sources = [path.read_text() for path in (EXAMPLES / name).glob("*.py")]
    blocks = CODE.findall((DOCS / f"{name}.md").read_text())
    assert blocks
    assert [block for block in blocks if not any(block in source for source in sources)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_was_tried_and_no_other_is_left_over(name):
    tried = import_module(f"{__package__}.test_{name.replace('-', '_')}")
    assert [row["way"] for row in read_rows(name)] == [str(variant) for variant in tried.VARIANTS]
    assert [row["way"] for row in read_rows(name) if "failed" in row] == []


def test_every_example_is_tested():
    examples = {path.parent.name for path in EXAMPLES.glob("*/agent.py")}
    tests = {path.stem.removeprefix("test_").replace("_", "-") for path in Path(__file__).parent.glob("test_*.py")}
    assert examples - {name for name in examples if name in tests} == set()
