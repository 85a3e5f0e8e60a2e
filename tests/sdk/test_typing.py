"""Types that mypy infers for an annotated agent, as its author would check it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AGENT = """
import asyncio
from typing import assert_type

from rllm import Trajectory
from rllm.sdk import trajectory


@trajectory
async def plain(question: str) -> str:
    return question


@trajectory(name="solver")
async def named(question: str) -> str:
    return question


@trajectory(name="judge", role="judge")
def judge(question: str) -> str:
    return question


async def agent(question: str) -> list[Trajectory]:
    assert_type(judge(question), Trajectory)
    first = asyncio.create_task(plain(question))
    assert_type(await first, Trajectory)
    return [await first, *await asyncio.gather(named(question), named(question))]
"""
MISTAKES = """

judge(1)
judge("2 + 2").rewrad = 1.0
"""


def types_by_mypy(folder: Path, agent: str) -> list[str]:
    (folder / "agent.py").write_text(agent)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "agent.py"]
    (folder / "mypy.ini").write_text(f"[mypy]\nmypy_path = {Path(__file__).parents[2] / 'src'}\n")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    return [line.partition(": error: ")[2] for line in (done.stdout + done.stderr).splitlines()]


@pytest.mark.slow
def test_recorded_function_keeps_its_types(tmp_path: Path) -> None:
    found = types_by_mypy(tmp_path, AGENT + MISTAKES)
    assert found == [
        'Argument 1 to "judge" has incompatible type "int"; expected "str"  [arg-type]',
        '"Trajectory" has no attribute "rewrad"; maybe "reward"?  [attr-defined]',
    ]
