"""`rllm train --env reasoning-gym:FAMILY` improves a policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learning.named import TRAININGS


@pytest.mark.games
def test_policy_learns_to_add(tmp_path: Path) -> None:
    first, *_, last = TRAININGS["reasoning-gym"].run(tmp_path / "run")
    assert first < 0.75 < 0.85 < last
