"""docs/models.md lists the results of the tests of this folder; in the fast suite, too."""

from __future__ import annotations

import pytest

from .conftest import template_folder
from .table import PAGE, with_tables


def test_table_of_architectures_is_current() -> None:
    page = PAGE.read_text()
    assert with_tables(page, ["architectures"]) == page, "run: make test-models"


@pytest.mark.models
@pytest.mark.skipif(template_folder() is None, reason="run `make test-models`")
def test_table_of_families_is_current() -> None:
    page = PAGE.read_text()
    assert with_tables(page, ["families"]) == page, "run: make test-models"
