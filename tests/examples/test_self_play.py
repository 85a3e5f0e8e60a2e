from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.games
@pytest.mark.parametrize("seed", [1])
def test_policy_beats_its_former_self(train: Callable[..., list[dict[str, Any]]], seed: int) -> None:
    first, *_, last = train("self_play", f"seed={seed}")
    assert last["eval/num_episodes"] == 200
    assert last["eval/game/win"] >= 0.7 > first["eval/game/win"]
