"""The programs of the README, run unchanged except for the model, the port and the number of steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..ports import free_port
from .conftest import rllm

README = (Path(__file__).parents[2] / "README.md").read_text()
SMALL = ["num_steps=1", "tasks_per_step=1", "rollout.group_size=2", "rollout.max_tokens=8", "run_dir=run"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def readme(tmp_path):
    """A folder with the README's files."""
    for program in blocks("python"):
        if name := re.match(r"# (\w+\.py)\n", program):
            (tmp_path / name[1]).write_text(program)
    (tmp_path / "tasks.jsonl").write_text(blocks("json")[0])
    return tmp_path


def commands(start):
    """Return the README's lines with this beginning, as arguments."""
    return [line.split()[1:] for block in blocks("sh") for line in block.splitlines() if line.startswith(start)]


def with_model(arguments, policy):
    return [
        str(policy) if item.startswith("Qwen/") else item.replace("Qwen/Qwen3-8B", str(policy)) for item in arguments
    ]


def test_first_lines_name_project_install_and_hardware():
    head = " ".join(README.split("```")[0].split())
    for fact in (
        "independent implementation",
        "from this repository",
        "PyPI",
        "docs/models-by-size.md",
        "GPU of 80 GB",
    ):
        assert fact in head


@pytest.mark.slow
def test_command_line_trains_the_agent(readme, policy):
    done = rllm(*with_model(commands("rllm train")[0], policy), *SMALL, cwd=readme)
    assert done.returncode == 0, done.stderr
    assert "step 1/1: reward" in done.stderr
    assert "failed" not in done.stderr


@pytest.mark.slow
def test_command_line_evaluates_the_agent(readme, policy):
    [arguments] = commands("rllm eval")
    arguments = with_model(arguments, policy)
    arguments[arguments.index("--n") + 1] = "2"
    done = rllm(*arguments, "sampling.max_tokens=8", "--out", "judged", cwd=readme)
    assert done.returncode == 0, done.stderr
    for word in ("accuracy", "pass@2", "reward", "tokens"):
        assert word in done.stdout
    assert "done already" in rllm(*arguments, "sampling.max_tokens=8", "--out", "judged", cwd=readme).stderr


@pytest.mark.slow
def test_python_program_trains(readme, policy):
    [program] = [program for program in blocks("python") if "AgentTrainer" in program]
    port = free_port()
    program = program.replace("Qwen/Qwen3-0.6B", str(policy)).replace("port=8000", f"port={port}")
    program = program.replace('"num_steps=1"', '"num_steps=1", "tasks_per_step=1", "rollout.max_tokens=8"')
    environment = {
        **os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "any", "PYTHONPATH": str(readme),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=readme,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (readme / "runs" / "first" / "checkpoints" / "step-000001" / "model.safetensors").exists()
    assert "step-000001" in done.stdout
