"""An attacker writes the dataset: a row must not choose the code that runs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.agents import MathAgent, ToolAgent
from rllm.data.sources import _check_files, read_hub
from rllm.engine import AgentExecutionEngine
from rllm.environments import GymnasiumEnv, SingleTurnEnvironment, ToolEnvironment
from rllm.errors import ConfigError
from rllm.testing import ScriptedEngine
from rllm.workflows import MultiTurnWorkflow

TASK = {"question": "2 + 2?", "ground_truth": "4"}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module on the path that records being imported; returns its name."""
    (tmp_path / "planted_by_row.py").write_text("def run(*args, **kwargs):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "planted_by_row"
    sys.modules.pop("planted_by_row", None)


@pytest.mark.parametrize(
    ("env_class", "row"),
    [
        (SingleTurnEnvironment, {"reward_fn": "planted_by_row:run"}),
        (SingleTurnEnvironment, {"task": "import os", "reward_fn": "cProfile:run"}),
        (ToolEnvironment, {"reward_fn": "planted_by_row:run"}),
        (ToolEnvironment, {"tools": ["planted_by_row:run"], "reward_fn": len}),
        (ToolEnvironment, {"tools": "planted_by_row:run", "reward_fn": len}),
        (ToolEnvironment, {"tool_map": {"x": "planted_by_row:run"}, "reward_fn": len}),
        (GymnasiumEnv, {"env": "planted_by_row:CartPole-v1"}),
    ],
)
def test_row_that_names_code_is_rejected_and_imports_nothing(planted: str, env_class: Any, row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        env_class.from_dict({**TASK, **row})
    assert planted not in sys.modules


def test_engine_imports_nothing_for_a_row(planted: str) -> None:
    engine = AgentExecutionEngine(
        agent_class=MathAgent, env_class=SingleTurnEnvironment, rollout_engine=ScriptedEngine(["4"])
    )
    with engine:
        (path,) = asyncio.run(engine.execute_tasks([{**TASK, "reward_fn": f"{planted}:run"}]))
    assert "cannot name code" in path.info["error"]["message"]
    assert planted not in sys.modules


def test_env_args_of_the_user_may_name_code(planted: str) -> None:
    env_args = {"reward_fn": f"{planted}:run", "tools": ["rllm.tools.calculator:Calculator", "python"]}
    engine = AgentExecutionEngine(
        agent_class=ToolAgent, env_class=ToolEnvironment, env_args=env_args, rollout_engine=ScriptedEngine(["4"])
    )
    with engine:
        (path,) = asyncio.run(engine.execute_tasks([TASK]))
    assert path.reward == 1.0
    workflow = MultiTurnWorkflow(
        agent_cls=MathAgent, env_cls=SingleTurnEnvironment, env_args=env_args, rollout_engine=ScriptedEngine(["4"])
    )
    assert callable(workflow.env_args["reward_fn"])


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset, beside a private file."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "dataset").mkdir()
    (tmp_path / "private.jsonl").write_text('{"secret": 1}\n')
    return tmp_path / "dataset"


@pytest.mark.parametrize("place", ["../private.jsonl", "{}/private.jsonl", "file://{}/private.jsonl", "{}/*.jsonl"])
def test_description_of_a_dataset_cannot_name_another_file(dataset: Path, place: str) -> None:
    named = place.format(dataset.parent)
    (dataset / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n")
    with pytest.raises(ConfigError, match=r"private\.jsonl.* is not part of it"):
        read_hub(str(dataset), split="train")


def test_link_in_a_dataset_cannot_lead_to_another_file(dataset: Path) -> None:
    (dataset / "train.jsonl").symlink_to(dataset.parent / "private.jsonl")
    with pytest.raises(ConfigError, match="is not part of it"):
        read_hub(str(dataset), split="train")


def test_saved_dataset_cannot_name_another_file(dataset: Path) -> None:
    import datasets

    for folder in (dataset, dataset.parent / "other"):
        datasets.Dataset.from_list([{"secret": 1}]).save_to_disk(folder)
    (other,) = (dataset.parent / "other").glob("*.arrow")
    state = json.loads((dataset / "state.json").read_text())
    state["_data_files"] = [{"filename": f"../other/{other.name}"}]
    assert read_hub(str(dataset), split=None) == [{"secret": 1}]
    (dataset / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="is not part of it"):
        read_hub(str(dataset), split=None)


def test_hub_dataset_names_only_its_own_files() -> None:
    _check_files("owner/name", ["hf://datasets/owner/name@1f2e/train.parquet"])
    for file in ("/etc/passwd", "https://metadata.internal/", "hf://datasets/owner/private@1f2e/x.parquet"):
        with pytest.raises(ConfigError, match="is not part of it"):
            _check_files("owner/name", [file])
