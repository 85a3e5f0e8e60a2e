"""`rllm train --env gymnasium:NAME` improves a policy; other schemes have this test where their packages are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .named import TRAININGS


@pytest.mark.learning
def test_policy_learns_to_cross_the_lake(tmp_path: Path) -> None:
    first, *_, last = TRAININGS["gymnasium"].run(tmp_path / "run")
    assert first < 0.4 < 0.7 < last
