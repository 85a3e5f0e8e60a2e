"""`rllm init`: a project that passes its own tests, and whose agent trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from rllm.cli.project import TEMPLATE
from rllm.trainer.config import load_config

from .conftest import here


@pytest.mark.slow
def test_new_project_passes_its_tests_and_its_agent_trains(tmp_path, policy):
    done = here("init", "shop", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Next: cd shop && python -m pytest (pip install pytest), then" in done.stdout
    project = tmp_path / "shop"
    assert (project / ".gitignore").is_file()
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_PROXY")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it needs none of the packages installed here
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout + tests.stderr
    trained = here(
        "train", "agent.py:agent", "--reward", "agent.py:reward", "--data", "tasks.jsonl", "--val", "held_out.jsonl",
        "--config", "rllm.yaml", "--model", policy, "num_steps=1", "tasks_per_step=2", "rollout.max_tokens=8",
        "eval.at_start=false", "run_dir=runs/first", cwd=project,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    [line, _] = map(json.loads, (project / "runs" / "first" / "metrics.jsonl").read_text().splitlines())
    assert line["rollout/reward"] == 0.0


def test_settings_of_the_project_are_valid():
    settings = yaml.safe_load((TEMPLATE / "rllm.yaml").read_text())
    assert load_config(settings).rollout.group_size == 8


def test_existing_folder_is_kept_unless_forced(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text("mine")
    done = here("init", cwd=tmp_path)
    assert done.returncode == 2
    assert "'.' is not empty: name another folder, or give --force" in done.stderr
    assert (tmp_path / "agent.py").read_text() == "mine"
    assert here("init", "--force", cwd=tmp_path).returncode == 0
    assert "def agent" in (tmp_path / "agent.py").read_text()
    assert here("init", "agent.py", cwd=tmp_path).returncode == 2


def test_printed_next_command_quotes_the_folder(tmp_path):
    assert "Next: cd 'my shop' && python" in here("init", "my shop", cwd=tmp_path).stdout


def test_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    done = here("init", "file/project", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot be written (Not a directory): name another folder" in done.stderr
    assert "Traceback" not in done.stderr
