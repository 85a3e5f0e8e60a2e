"""The policy with which all runs begin, built once, by the first process of the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from rllm._runtime.files import lock

from .alphabet import policy


@pytest.fixture(scope="session")
def beginner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with (tmp_path_factory.getbasetemp().parent / "policy.lock").open("w") as file:
        lock(file, wait=True)
        return policy()
