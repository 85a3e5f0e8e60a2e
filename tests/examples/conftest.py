"""Examples are scripts next to their modules, so tests import them as `python examples/<name>/train.py` would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy

Example = Callable[[str, str], ModuleType]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """`example("grid_world", "agent")` is `examples/grid_world/agent.py`; the next test may have another `agent`."""

    def load(name: str, module: str) -> ModuleType:
        monkeypatch.syspath_prepend(EXAMPLES / name)
        return import_module(module)

    others = set(sys.modules)
    yield load
    for name in sys.modules.keys() - others:
        if EXAMPLES in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`train("grid_world", "seed=1")` runs the example's train.py, and returns the metrics of each of its evaluations."""

    def run(name: str, *settings: str) -> list[dict[str, Any]]:
        command = [sys.executable, str(EXAMPLES / name / "train.py"), f"run_dir={tmp_path / 'run'}", *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "eval/accuracy" in line]

    return run


@pytest.fixture(scope="session")
def small_model(policies: Path) -> Path:
    """Real model that generates arbitrary text; it is built in a second."""
    recipe = TinyPolicyRecipe(
        hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, skill_steps=1, habit_steps=1, batch_size=2
    )
    return tiny_policy(_talk, _talk, recipe=recipe, cache_dir=policies)


def _talk(seed: int) -> Iterator[list[dict[str, str]]]:
    return repeat([{"role": "user", "content": f"Hello, {seed}"}, {"role": "assistant", "content": "Hello"}])


@pytest.fixture
def one_step(example: Example, small_model: Path, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """`one_step("grid_world")` runs the example's train.py on that model, and returns the metrics of its only step."""

    def run(name: str) -> dict[str, Any]:
        small = [
            "num_steps=1",
            "tasks_per_step=2",
            "rollout.group_size=2",
            "rollout.max_tokens=2",
            "eval.at_start=false",
        ]
        example(name, "offline").NUM_HELD_OUT = 4
        example(name, "train").main([f"model.path={small_model}", f"run_dir={tmp_path / 'run'}", *small])
        lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        return next(line for line in lines if "timing/step_s" in line)

    return run
