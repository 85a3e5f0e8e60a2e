"""Rollouts of generated tasks in sandboxes of bubblewrap, with a scripted model behind a real gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rllm.config.schema import SandboxSettings
from rllm.environments import open_env
from rllm.errors import AgentError, CaptureError, ConfigError, RLLMError
from rllm.sandbox import SandboxError
from rllm.sandbox.control_groups import left_groups
from rllm.sandbox.owner import this_process
from rllm.tasks.shell_tasks import shell_tasks
from rllm.testing.gateway import scripted_gateway
from rllm.testing.scripted import Script
from rllm.trainer import AgentTrainer
from rllm.types import VERDICT_KEY, Episode

from .conftest import backend_or_skip

TASKS = "tasks:shell?size=8&seed=3"
CREATE, *_ = shell_tasks(8, seed=3)
in_sandboxes = pytest.mark.sandbox


@pytest.fixture(autouse=True)
def cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("sandbox"):
        backend_or_skip("local")
    monkeypatch.setenv("RLLM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def rolled_out(script: Script, more: str = "", *, number: int = 0) -> Episode:
    """Roll out a task of `TASKS`; the first one is to create a file."""
    named = open_env(TASKS + more)
    assert named.agent_run_func is not None
    with scripted_gateway(script) as gateway:
        return gateway.rollout(named.agent_run_func, named.tasks[number])


@pytest.fixture
def written(tmp_path: Path) -> Iterator[object]:
    """`written(text)` is `&agent=FILE.py:work` for an agent of this text."""

    def write(text: str) -> str:
        (tmp_path / "own_agent.py").write_text(text)
        return f"&agent={tmp_path}/own_agent.py:work"

    return write


@in_sandboxes
@pytest.mark.parametrize("number", range(8))
def test_terminus_solves_a_task(number: int) -> None:
    command = shell_tasks(8, seed=3)[number].command
    episode = rolled_out([command, "done"], number=number)
    assert episode.is_correct
    [trajectory] = episode.trajectories
    assert [step.model_response for step in trajectory.steps] == [command, "done"]
    assert all(step.response_ids for step in trajectory.steps)
    assert trajectory.reward == 1.0


@in_sandboxes
def test_episode_has_changes_and_verification() -> None:
    episode = rolled_out(["echo nonsense > wrong.txt", "done"])
    assert episode.trajectories[0].reward == 0.0
    verdict = episode.trajectories[0].info[VERDICT_KEY]
    assert verdict["files changed"].startswith("added wrong.txt")
    assert "+nonsense" in verdict["diff"]
    assert "Only in /app: wrong.txt" in verdict["verifier output"]


@in_sandboxes
def test_terminus_calls_a_tool_if_the_model_supports_tools() -> None:
    call = {"tool_calls": [{"name": "shell", "arguments": {"command": CREATE.command}}]}
    wrong = {"tool_calls": [{"name": "bash", "arguments": {}}]}
    episode = rolled_out([wrong, call, "I have made the file."], "&agent=terminus-tools")
    assert episode.is_correct
    [*_, last] = episode.trajectories[0].steps
    assert [message["content"] for message in last.chat_completions if message["role"] == "tool"] == [
        'Call the tool shell, with {"command": "..."}.',
        "[exit code 0]",
    ]


@in_sandboxes
def test_terminus_runs_a_command_without_its_zero_bytes() -> None:
    assert rolled_out([CREATE.command.replace(" ", "\0 ", 1), "done"]).is_correct


@in_sandboxes
def test_terminus_ends_when_no_commands_are_left() -> None:
    episode = rolled_out(["ls"], "&max_steps=3")
    assert [step.model_response for step in episode.trajectories[0].steps] == ["ls"] * 3


ASYNC = """\
from openai import AsyncOpenAI

async def work(instruction, sandbox, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        question = [{"role": "user", "content": instruction}]
        answer = await client.chat.completions.create(model="policy", messages=question)
    await sandbox.exec(answer.choices[0].message.content)
"""
SYNC = """\
from openai import OpenAI

def work(instruction, sandbox, base_url, api_key):
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        question = [{"role": "user", "content": instruction}]
        answer = client.chat.completions.create(model="policy", messages=question)
    sandbox.exec(answer.choices[0].message.content)
"""
IN_THE_SANDBOX = """\
import json

PROGRAM = '''
import json, sys, urllib.request
url, instruction = sys.argv[1:]
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": instruction}]}).encode()
request = urllib.request.Request(url + "/chat/completions", body, {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
'''

async def work(instruction, sandbox, base_url):
    url = await sandbox.open_route(base_url)
    answer = await sandbox.exec(["python3", "-c", PROGRAM, url, instruction])
    await sandbox.exec(answer.stdout)
"""


@in_sandboxes
@pytest.mark.parametrize("text", [ASYNC, SYNC, IN_THE_SANDBOX], ids=["async", "sync", "through a route"])
def test_function_receives_the_sandbox(written, text: str) -> None:
    episode = rolled_out([CREATE.command], written(text))
    assert episode.is_correct
    assert [step.model_response for step in episode.trajectories[0].steps] == [CREATE.command]


@in_sandboxes
@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("def work(sandbox):\n    sandbox.exec('true')\n", CaptureError, "made no model call"),
        ("def work(sandbox):\n    raise ValueError('no idea')\n", AgentError, "own_agent.py:work raised ValueError"),
        (
            "async def work(sandbox):\n    await sandbox.close()\n    await sandbox.exec('true')\n",
            SandboxError,
            "closed",
        ),
    ],
    ids=["never calls the model", "raises", "its sandbox ends"],
)
def test_agent_error_is_attributed_to_it(written, text: str, error: type[RLLMError], named: str) -> None:
    with pytest.raises(error, match=named):
        rolled_out(["unused"], written(text))


@in_sandboxes
def test_failed_installation_of_a_program_is_reported() -> None:
    with pytest.raises(AgentError, match=r"agent=mini-swe-agent 0\.0\.0 cannot be installed"):
        rolled_out(["unused"], "&agent=mini-swe-agent@0.0.0")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("&sandbox=podmen", "'podman'"),
        ("&agent=terminis", "'terminus'"),
        ("&cpus=none", "cpus=none"),
        ("&cpus=inf", "cpus=inf"),
        ("&memory=3", "'memory_mb'"),
    ],
)
def test_unknown_names_and_values_are_rejected(more: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_env(TASKS + more)


def test_sandbox_that_cannot_start_is_rejected_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"(?i)docker"):
        open_env(TASKS + "&sandbox=docker")


@in_sandboxes
def test_sandbox_limits_come_from_settings_unless_the_name_sets_them() -> None:
    """Limit of the kernel: data beyond 1 MiB does not fit."""
    settings = SandboxSettings(cpus=0.5, memory_mb=300, disk_mb=1)
    script = ["head -c 3000000 /dev/zero > big; wc -c < big", "done"]
    shown = {}
    for more in ("", "&disk_mb=10"):
        named = open_env(TASKS + more, sandbox=settings)
        with scripted_gateway(script) as gateway:
            steps = gateway.rollout(named.agent_run_func, named.tasks[0]).trajectories[0].steps
        shown[more] = steps[-1].chat_completions[-2]["content"]
    assert "No space left on device" in shown[""]
    assert shown["&disk_mb=10"] == "3000000"


def test_sandbox_settings_without_sandboxes_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.backend='podman'"):
        open_env("gymnasium:CartPole-v1", sandbox=SandboxSettings(backend="podman"))
    with pytest.raises(ConfigError, match=r"sandbox\.cpus=2"):
        AgentTrainer(agent_run_func=lambda **task: 1.0, train_dataset=[{"a": 1}], config=["sandbox.cpus=2"])


@in_sandboxes
def test_sandboxes_are_limited_by_a_pool() -> None:
    """With one sandbox at a time, which is closed before the verifier has its own, a rollout ends; and none remains."""
    named = open_env(TASKS, sandbox=SandboxSettings(concurrency=1, warm=1))
    with scripted_gateway(["done"]) as gateway:
        episode = gateway.rollout(named.agent_run_func, named.tasks[0])
    assert not episode.failed
    owner = this_process()
    assert not [group for group in left_groups() if owner in group.name]
