"""The programs of docs/run.md run, and the names in it exist."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from rllm.cli import app
from rllm.registry import load_function
from rllm.sdk import ProgramResult
from rllm.sdk.variables import gateway_variables
from rllm.testing import ScriptedEngine, ScriptedServer, scripted_gateway

from .conftest import as_a_program, here

TEXT = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
PROGRAM = """
import sys
from openai import OpenAI
print(OpenAI().responses.create(model="any", input=sys.argv[1], max_output_tokens=8).output_text)
"""


@pytest.fixture
def folder(work):
    """The files of the page, in the current directory."""
    (work / "my_agent.py").write_text(PROGRAM)
    [agent] = re.findall(r"```python\n# (shell_agent.py\n.*?)```", TEXT, re.DOTALL)
    (work / "shell_agent.py").write_text(agent.partition("\n")[2])
    return work


def commands(start):
    lines = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(start)]


@pytest.mark.docs
def test_documented_command_runs(folder, monkeypatch):
    [arguments] = commands("rllm run")
    at = arguments.index("--tokenizer")
    del arguments[at : at + 2]  # the scripted server does not accept prompts of tokens
    with ScriptedServer(ScriptedEngine(["It is 4."])) as server:
        arguments = [server.base_url if "8000" in item else item for item in arguments]
        done = here(*[sys.executable if item == "python" else item for item in arguments], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "It is 4.\n"
    assert "1 call in session first" in done.stderr


@pytest.mark.docs
async def test_documented_agent_is_an_agent_function(folder):
    with as_a_program(), scripted_gateway(["It is 4."]) as gateway:
        agent = load_function("shell_agent.py:agent")
        episode = await gateway.rollout_async(agent, {"question": "What is 2 + 2?", "answer": "4"})
    assert episode.trajectories[0].reward == 1.0
    assert len(episode.trajectories[0].steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "eval"])
def test_documented_agent_is_trained_and_evaluated(folder, policy, command):
    [arguments] = commands(f"rllm {command}")
    arguments = [str(policy) if item.startswith("Qwen/") else item for item in arguments]
    small = ["num_steps=1", "tasks_per_step=1", "rollout.group_size=2", "rollout.max_tokens=8", "run_dir=run"]
    done = here(
        *arguments, *(small if command == "train" else ["sampling.max_tokens=8", "--out", "judged"]), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "CaptureError" not in done.stderr + done.stdout


def test_documented_options_exist():
    parameters = get_command(app).get_command(None, "run").params
    known = {option for parameter in parameters for option in parameter.opts}
    named = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert named <= known
    assert known - named <= {"--upstream", "--api-key", "--upstream-kind", "--store", "--help", "command"}


def test_documented_variables_and_fields_exist():
    given = gateway_variables("http://127.0.0.1:1/sessions/s")
    described = TEXT.partition("## Environment of the program")[2]
    variables = re.findall(r"`([A-Z_]{4,})`", described)
    assert len(variables) >= 12
    assert set(variables) <= set(given)
    fields = re.search(r"The result has (.*?)\. Outside", TEXT, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", fields)) <= set(ProgramResult.__dataclass_fields__)
