"""`TASKS --agent NAME --sandbox BACKEND`: mistakes are refused before a model is loaded, and rollouts are explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

from ..sandbox.conftest import backend_or_skip
from .conftest import here

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


@pytest.mark.parametrize("command", ["eval", "train"])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--agent", "codex"], "the tasks are missing"),
        (["nowhere", "--agent", "terminus"], "nowhere"),
        ([str(EXAMPLES), "--agent", "terminis"], "did you mean 'terminus'"),
        ([str(EXAMPLES), "--sandbox", "podmen"], "did you mean 'podman'"),
        (["--env", "tasks:x", "--agent", "codex"], "--env 'tasks:DIR?agent=codex'"),
        (["my_agent.py:agent", "--data", "tasks.jsonl", "sandbox.cpus=2"], "sandbox.cpus=2"),
    ],
)
def test_invalid_arguments_are_rejected(command, arguments, named, work, fails):
    code, printed = fails(command, *arguments, "--model", "some/model")
    assert code == 2
    assert named in printed
    assert "loading" not in printed


@pytest.mark.sandbox
def test_rollout_is_evaluated_and_explained(tmp_path):
    backend_or_skip("local")
    solution = (EXAMPLES / "log-report" / "solution" / "solve.sh").read_text()
    engine = ScriptedEngine([f"```sh\n{solution}```", "done"])
    with ScriptedServer(engine, model="big") as server:
        given = [
            str(EXAMPLES / "log-report"),
            "--agent",
            "terminus",
            "--sandbox",
            "local",
            "--base-url",
            server.base_url,
        ]
        done = here("eval", *given, "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["accuracy"]["value"], report["tasks"][0]["cost"]["num_calls"]) == (1.0, 2.0)
    explained = here("explain", "out", f"{report['tasks'][0]['task_id']}:0", cwd=tmp_path)
    assert "files changed: added report.csv" in explained.stdout
    assert "+service,events,errors" in explained.stdout


@pytest.mark.sandbox
def test_oracle_makes_no_model_calls(tmp_path):
    backend_or_skip("local")
    with ScriptedServer(ScriptedEngine(["unused"]), model="big") as server:
        done = here("eval", str(EXAMPLES), "--agent", "oracle", "--base-url", server.base_url, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"]["value"] == 1.0
    assert server.requests == []
