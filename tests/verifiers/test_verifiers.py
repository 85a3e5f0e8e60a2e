"""Environments of the package verifiers, of both its interfaces, each with its own version in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.learning.named import verifiers

pytestmark = pytest.mark.envs

HERE = Path(__file__).parent
OLD, NEW = (Path(os.environ.get("RLLM_VERIFIERS", ".verifiers")) / name for name in ("old", "new"))
CASES = [(OLD, "words", ""), (NEW, "word_tasks", "&harness=null&runtime=subprocess")]


def rolled_out(venv: Path, spec: str) -> subprocess.CompletedProcess[str]:
    """Run `roll_out.py` in a virtual environment, in the folder of the environments."""
    folder = HERE / "environments"
    path = f"{(venv / 'bin').absolute()}:{os.environ['PATH']}"
    return subprocess.run(
        [str((venv / "bin" / "python").absolute()), str(HERE / "roll_out.py"), spec],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(("venv", "name", "more"), CASES, ids=["load_environment", "taskset"])
def test_rollouts_of_an_environment_are_captured_by_the_gateway(venv: Path, name: str, more: str) -> None:
    done = rolled_out(venv, f"verifiers:{name}?num_words=3{more}")
    assert done.returncode == 0, done.stderr
    red, blue, green = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (red["task"], red["reward"], red["answer"]) == (f"{name}/0", 1.0, "It is red.")
    assert (blue["reward"], blue["answer"]) == (1.0, "Say blue.")
    assert red["tokens"] > 0
    assert red["metrics"]["repeats"] == 1.0
    assert green.get("error") or green["reward"] == 0.0


def test_policy_learns_letters(tmp_path: Path) -> None:
    first, *_, last = verifiers(OLD).run(tmp_path / "run")
    assert first < 0.45
    assert last > first + 0.25


@pytest.mark.parametrize(("venv", "name", "more"), CASES, ids=["load_environment", "taskset"])
def test_invalid_name_or_parameter_is_rejected(venv: Path, name: str, more: str) -> None:
    assert "there is no module 'wordz'" in rolled_out(venv, "verifiers:wordz").stderr
    assert "num_word" in rolled_out(venv, f"verifiers:{name}?num_word=2").stderr
    assert len(rolled_out(venv, f"verifiers:{name}?size=1{more}").stdout.splitlines()) == 1
