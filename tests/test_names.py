"""The names that users of the rLLM framework import: the table of docs/upstream.md, row by row."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from rllm.gone import GONE

TABLE = Path(__file__).parents[1] / "docs" / "upstream.md"
ROWS = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)`(?: as `(\w+)`)? \|$", TABLE.read_text(), re.MULTILINE)
PATHS = sorted({path for remedy in GONE.values() for path in re.findall(r"rllm(?:\.\w+)+", remedy)})


def test_the_table_is_read() -> None:
    assert len(ROWS) == TABLE.read_text().count("\n| `") > 70


@pytest.mark.parametrize(("old", "home", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_an_old_path_gives_the_object_that_lives_at_home(old: str, home: str, name: str) -> None:
    module, _, attribute = old.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is getattr(
        importlib.import_module(home), name or attribute
    )


@pytest.mark.parametrize("gone", GONE)
def test_an_import_of_what_is_gone_says_what_to_use(gone: str) -> None:
    package, _, name = gone.rpartition(".")
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"{gone} of the rLLM framework is not here: {GONE[gone]}")):
        exec(f"from {package} import {name}" if name[0].isupper() else f"import {gone}", {})


@pytest.mark.parametrize("remedy", sorted(set(GONE.values())))
def test_what_is_gone_is_told_in_the_docs(remedy: str) -> None:
    names = [gone.rpartition(".")[2] for gone, said in GONE.items() if said == remedy]
    assert any(name in TABLE.read_text() for name in names), names


@pytest.mark.parametrize("path", PATHS)
def test_what_is_to_be_used_instead_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name) or importlib.import_module(path)


def test_what_nobody_knows_is_not_found_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'rllm\.nonsense'$"):
        importlib.import_module("rllm.nonsense")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from rllm.sdk.protocol import Nonsense", {})
    assert not hasattr(importlib.import_module("rllm.sdk"), "Nonsense")
