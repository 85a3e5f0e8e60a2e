"""The SDK includes a program of 370 MB, so these tests run where `make test-frameworks FRAMEWORK=claude-agent-sdk` installed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks

INSTALLED = Path(__file__).parents[2] / ".frameworks" / "claude-agent-sdk"


@pytest.fixture(autouse=True)
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK alone: its dependencies are in this environment."""
    packages = list(INSTALLED.glob("lib/python*/site-packages/claude_agent_sdk"))
    assert packages, f"{INSTALLED} has no SDK: run `make test-frameworks FRAMEWORK={INSTALLED.name}`"
    (tmp_path / "claude_agent_sdk").symlink_to(packages[0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_training_reaches_the_reward_in_the_readme(train: Callable[..., list[dict[str, Any]]]) -> None:
    first, *_, last = train("claude_agent")
    assert first["eval/accuracy"] <= 0.4
    assert last["eval/accuracy"] >= 0.8
