"""Third-party coding agents, unmodified, each solve a task in a sandbox of bubblewrap with a scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rllm.environments import open_env
from rllm.tasks.agents.programs import PROGRAMS
from rllm.tasks.shell_tasks import shell_tasks
from rllm.testing.gateway import scripted_gateway
from rllm.types import VERDICT_KEY

from .conftest import backend_or_skip

pytestmark = pytest.mark.frameworks

INSTALLED = Path(__file__).parents[2] / ".frameworks"
TOOLS = {
    "claude-code": ("Bash", {"command": "$command", "description": "Do it"}),
    "codex": ("exec_command", {"cmd": "$command"}),
    "mini-swe-agent": ("bash", {"command": "$command"}),
    "opencode": ("bash", {"command": "$command", "description": "Do it"}),
    "qwen-code": ("run_shell_command", {"command": "$command", "is_background": False}),
}
LAST = {"mini-swe-agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
"""Last command of agents that end with one."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_solves_a_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_or_skip("local")
    monkeypatch.setenv("RLLM_CACHE", str(INSTALLED / "cache"))
    [task] = shell_tasks(1, seed=3)

    def answer(messages: list[dict[str, Any]]) -> Any:
        if not any(message["role"] == "tool" for message in messages):
            return called(name, task.command)
        return called(name, LAST[name]) if name in LAST else "I have made the file."

    named = open_env(f"tasks:shell?size=1&seed=3&agent={name}")
    with scripted_gateway(answer) as gateway:
        episode = gateway.rollout(named.agent_run_func, named.tasks[0])
    [trajectory] = episode.trajectories
    assert trajectory.reward == 1.0, trajectory.info[VERDICT_KEY]
    assert len(trajectory.steps) == 2
    assert all(step.response_ids for step in trajectory.steps)


def called(name: str, command: str) -> dict[str, Any]:
    tool, arguments = TOOLS[name]
    text = json.dumps(arguments).replace('"$command"', json.dumps(command))
    return {"tool_calls": [{"name": tool, "arguments": json.loads(text)}]}
