"""The table of families: each row is computed, and has a reason for each inexact property."""

from __future__ import annotations

import pytest

from .conftest import template_folder
from .survey import FAMILIES, row

pytestmark = pytest.mark.models


@pytest.mark.parametrize("family", FAMILIES)
def test_inexact_templates_have_a_reason(family: str) -> None:
    if template_folder() is None:
        pytest.skip("run `make test-models`")
    for name in FAMILIES[family]:
        found = row(family, name)
        assert found.reason or (found.reads_calls and found.exact_turns)
